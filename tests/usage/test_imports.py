"""Usage from elsewhere: exact sums, bad lines by number, each row once, whatever is run again or at once."""

import json
from datetime import UTC, datetime
from functools import partial

import pytest
from django.core.management import CommandError, call_command

from controlplane.lab.traces import TraceError, TraceRequest
from controlplane.usage.imports import ImportRow, Result, import_file, store
from controlplane.usage.models import ImportedUsage, UsageRecord
from tests.threads import at_once

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2026-03-01 10:00:01.5000009,120,7\r\n"
    "2026-03-01 10:00:01.2500000,90,8\r\n"
    "2026-03-01 11:00:02,many,3\r\n"
    "2026-03-01 11:00:02.0000000,30,3"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45.5,GPT-4,1087,230,1317,Conversation log\n"
    "-3,GPT-4,1,1,2,API log\n"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 600, "output_length": 52, "hash_ids": [1, 2]}\n'
    '{"timestamp": 0, "input_length": 512, "output_length": 40, "hash_ids": [1]}\n'
    "{broken\n"
)
JSONL = (
    '{"at": "2026-03-01T10:00:00+01:00", "prompt_tokens": 10, "output_tokens": 4, "cached_tokens": 6,'
    ' "tenant": "ada", "id": "a"}\n'
    '{"at": "2026-03-01T10:00:00Z", "prompt_tokens": 1, "output_tokens": 1, "tenant": "bob", "id": "a"}\n'
    '{"at": "2026-03-01T10:00:00Z", "prompt_tokens": 1, "output_tokens": 1, "cached_tokens": 2}\n'
    '{"at": "2026-03-01T10:00:00Z", "prompt_tokens": 1, "output_tokens": 1, "user": "x"}\n'
    "[1]\n"
)
FOCUS = (
    "ChargePeriodStart,ConsumedQuantity,ConsumedUnit,SkuMeter,SkuId\n"
    "2026-03-01T00:00:00Z,1000000,Tokens,Input tokens,m-1\n"
    "2026-03-01T00:00:00Z,250000.0,Tokens,Output tokens,m-1\n"
    "2026-03-01T00:00:00Z,400,Tokens,Cached input tokens,m-1\n"
    "2026-03-01T00:00:00Z,3,Hours,GPU,m-2\n"
    "2026-03-01T00:00:00Z,1.5,Tokens,Input tokens,m-1\n"
)


@pytest.fixture
def run(tmp_path, installation, now):
    def run(text, **more):
        path = tmp_path / more.pop("name", "trace")
        path.write_bytes(text.encode())
        return import_file(path, source=more.pop("source", "trace"), now=now, **more)

    return run


def test_sums_hours_and_the_busiest_second_are_those_of_the_file(run):
    records = UsageRecord.objects.count()
    done = run(AZURE)
    assert (done.format, done.rows, done.stored, done.refused_count) == ("azure", 4, 3, 1)
    assert [bad.line for bad in done.refused] == [4]
    assert (done.prompt, done.cached, done.output, done.peak_per_second) == (240, 0, 18, 2)
    body = done.as_json()
    assert (body["first"], body["last"]) == ("2026-03-01T10:00:01.250000Z", "2026-03-01T11:00:02Z")
    assert [hour["requests"] for hour in body["by_hour"]] == [2, 1]
    assert ImportedUsage.objects.get(prompt_tokens=120).at == datetime(2026, 3, 1, 10, 0, 1, 500_000, tzinfo=UTC)
    assert UsageRecord.objects.count() == records, "what is imported is nobody's charge"


def test_a_second_run_of_the_same_file_adds_nothing_even_under_another_name(run):
    run(AZURE)
    again = run(AZURE, name="copy")
    assert (again.rows, again.stored, again.duplicates) == (4, 0, 3)
    assert again.prompt == 240
    assert ImportedUsage.objects.count() == 3
    assert run(AZURE, source="other").stored == 3


def test_lines_that_are_alike_are_not_the_same(run):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2026-03-01 10:00:01,5,5\n" * 3
    assert run(text).stored == 3


@pytest.mark.parametrize(
    ("text", "format", "rows", "stored", "prompt", "output"),
    [
        (BURST, "burstgpt", 3, 2, 1559, 248),
        (MOONCAKE, "mooncake", 3, 2, 1112, 92),
        (JSONL, "jsonl", 5, 2, 11, 5),
        (FOCUS, "focus", 5, 3, 1_000_400, 250_000),
    ],
)
def test_every_format_is_known_by_its_first_line(run, text, format, rows, stored, prompt, output):
    done = run(text)
    assert (done.format, done.rows, done.stored) == (format, rows, stored)
    assert (done.prompt, done.output) == (prompt, output)
    assert run(text).stored == 0


def test_a_trace_without_dates_begins_where_one_says(run):
    start = datetime(2026, 10, 1, tzinfo=UTC)
    done = run(MOONCAKE, start=start)
    assert done.first == start and (done.last - start).total_seconds() == 3
    assert run(AZURE, start=start).first.year == 2026


def test_an_id_with_other_content_is_refused_and_the_first_kept(run):
    run(JSONL)
    done = run(JSONL.replace('"output_tokens": 4', '"output_tokens": 5'), name="second")
    assert done.refused[0].line == 1 and "first is kept" in done.refused[0].reason
    assert ImportedUsage.objects.get(tenant_slug="ada").output_tokens == 4


def test_rows_of_one_batch_with_one_identity_count_once(installation, now):
    rows = [
        ImportRow("a", TraceRequest(1, 2, 3)),
        ImportRow("a", TraceRequest(1, 2, 3)),
        ImportRow("a", TraceRequest(1, 2, 4)),
    ]
    assert store(rows, source="s", now=now) == [Result.STORED, Result.DUPLICATE, Result.CONFLICT]
    assert store(rows[:1], source="s", now=now) == [Result.DUPLICATE]


@pytest.mark.django_db(transaction=True)
def test_two_imports_at_once_store_each_row_once(installation, now):
    rows = [ImportRow(f"r{n}", TraceRequest(n, 1, 1)) for n in range(2_000)]
    orders = (rows, rows[::-1], rows[500:] + rows[:500])
    works = [partial(store, order, source="s", now=now) for order in orders]
    results = [result for answer in at_once(works, within_s=60) for result in answer]
    assert results.count(Result.STORED) == 2_000 == ImportedUsage.objects.count()
    assert results.count(Result.DUPLICATE) == 4_000


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "", "\x00\x01"])
def test_files_that_are_none_of_the_formats(run, text):
    with pytest.raises(TraceError):
        run(text)


def test_the_command_prints_json_and_names_what_it_cannot_use(installation, tmp_path, capsys):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    call_command("import_usage", str(path), "--json")
    body = json.loads(capsys.readouterr().out)
    assert body["rows"] == 4 and body["stored"] == 3 and body["source"] == "azure.csv"
    assert body["tokens"] == {"prompt": 240, "cached": 0, "output": 18}
    call_command("import_usage", str(path))
    assert "3 known already" in capsys.readouterr().out
    path.write_bytes(b"TIMESTAMP,ContextTokens,GeneratedTokens\n\xff\xfe")
    for arguments in ([str(path)], [str(tmp_path / "none")], [str(path), "--source", "x" * 200]):
        with pytest.raises(CommandError) as error:
            call_command("import_usage", *arguments)
        assert error.value.returncode == 2
