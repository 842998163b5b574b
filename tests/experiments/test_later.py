"""What a request leaves to a worker: a pool's records, long synthetic traffic, and large files."""

from __future__ import annotations

import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.experiments import actions, draft_effects, inputs, running
from controlplane.experiments.forms import FORMS
from controlplane.experiments.models import Experiment
from controlplane.experiments.preparing import DRAFT, JOB, LIGHT_BYTES, LIGHT_ROWS, LOAD, TRACE, UPLOAD, is_light
from controlplane.experiments.queries import answer_of
from controlplane.usage.models import UsageRecord
from tests.experiments.test_pages import ADA, SMALL, asked, page

REPLAY = {**SMALL, "policy": "fifo", "batch_items": "0"}


def usage_of(pool) -> dict[str, str]:
    return {
        **REPLAY,
        "policy": "reserved",
        "source": "usage",
        "pool": pool.slug,
        "minutes": "60",
        "service_model": "fitted",
    }


def forget(all_but: int = 0) -> None:
    """Records go, as by retirement, except so many of the oldest."""
    with connection.cursor() as cursor:
        cursor.execute(
            "DELETE FROM usage_record WHERE request_id NOT IN"
            " (SELECT request_id FROM usage_record ORDER BY arrived_at LIMIT %s)",
            [all_but],
        )


def values_of(kind: str, values: dict[str, str]) -> dict:
    form = FORMS[kind](values)
    assert form.is_valid(), form.errors
    return form.values(timezone.now())


def test_records_are_read_by_the_worker_and_the_request_reads_one(served, people):
    with CaptureQueriesContext(connection) as seen:
        row = asked(people["admin"], "replay", usage_of(served.pool))
    of_records = [query["sql"] for query in seen.captured_queries if '"usage_record"' in query["sql"]]
    assert of_records and all("LIMIT 1" in sql for sql in of_records)
    assert not row.prepared and row.arguments == [] and row.inputs == {} and row.source.startswith("usage of ")
    assert "reads its traffic" in page(people["viewer"], row)
    assert running.run(row.pk)
    row.refresh_from_db()
    assert (row.state, row.prepared, row.problem) == ("done", True, "")
    assert {name: content.count(b"\n") for name, content in inputs.read(row).items()} == {TRACE: 240, JOB: 80}
    again = actions.rerun(experiment_id=row.pk, actor=ADA, now=timezone.now())
    forget()
    assert running.run(again.pk)
    again.refresh_from_db()
    assert again.result.sha256 == row.result.sha256


def test_what_only_records_tell_is_the_failure_of_the_experiment(served, people):
    row = asked(people["admin"], "replay", usage_of(served.pool))
    forget(all_but=10)
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "failed" and "a service model needs 50" in row.problem and not row.prepared
    assert "a service model needs 50" in page(people["viewer"], row)
    forget()
    bad = people["admin"].post(reverse("lab-new", args=["replay"]), usage_of(served.pool))
    assert bad.status_code == 422 and "has no usage between" in bad.text


def test_an_effect_is_of_the_draft_as_it_was_when_it_was_asked(served, people):
    chat, pool = served.chat, served.pool
    chat.max_prompt_tokens = 1_000
    chat.save(update_fields=["max_prompt_tokens"])
    (row,) = draft_effects.ask("60", actor=ADA, now=timezone.now())
    assert not row.prepared and DRAFT in row.inputs and LOAD not in row.inputs
    chat.max_prompt_tokens = 100
    chat.save(update_fields=["max_prompt_tokens"])
    assert running.run(row.pk)
    row.refresh_from_db()
    long = UsageRecord.objects.filter(pool_id=pool.pk, prompt_tokens__gt=1_000, job_id=0).count()
    assert answer_of(row)["draft"]["classes"]["chat"]["refused"]["prompt_too_long"] == long > 0


def test_while_a_draft_is_simulated_its_review_compiles_nothing(served, people):
    admin = people["admin"]
    served.chat.max_prompt_tokens = 1_000
    served.chat.save(update_fields=["max_prompt_tokens"])
    with CaptureQueriesContext(connection) as first:
        begun = admin.post(reverse("draft-effect"), {"minutes": "60"}, headers={"HX-Request": "true"}).text
    row = Experiment.objects.get()
    address = f"{reverse('draft-effect')}?digest={row.draft_digest}"
    assert address in begun
    with CaptureQueriesContext(connection) as seen:
        assert "It waits for a worker" in admin.get(address).text
    compiled = "contracts_workloadclass"
    assert sum(compiled in query["sql"] for query in first.captured_queries) > 0
    assert not [query["sql"] for query in seen.captured_queries if compiled in query["sql"]]
    for bad in ("x", "0" * 64, row.draft_digest.upper()):
        assert admin.get(reverse("draft-effect"), {"digest": bad}).status_code == 200
    assert running.run(row.pk)
    after = admin.get(address).text
    assert "chat: refused" in after and "every 2s" not in after


def test_one_that_is_cancelled_while_it_is_read_stays_cancelled(served, people):
    row = asked(people["admin"], "replay", usage_of(served.pool))
    claimed = running._claim(row.pk, timezone.now())
    actions.cancel(experiment_id=row.pk, actor=ADA, now=timezone.now())
    assert not running._prepared(claimed)
    row.refresh_from_db()
    assert row.state == "cancelled" and not row.prepared and row.inputs == {}


def trace(size: int) -> bytes:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for at in range(size // 36):
        lines.append(f"2026-10-31 10:{at // 60 % 60:02}:{at % 60:02}.0000000,{100 + at % 900},{10 + at % 90}")
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize(
    ("kind", "values", "size", "light"),
    [
        ("interference", {"minutes": f"{LIGHT_ROWS / 600:g}", "rate_per_s": "10", "batch_items": "0"}, 0, True),
        ("interference", {"minutes": "160", "rate_per_s": "2", "batch_items": "20"}, 0, False),
        ("replay", {"minutes": "1600", "rate_per_s": "1", "batch_items": "0"}, 0, False),
        ("replay", {"source": "file", "batch_items": "0"}, LIGHT_BYTES - 5_000, True),
        ("replay", {"source": "file", "batch_items": "0"}, 3_900_000, False),
    ],
)  # fmt: skip
def test_a_request_takes_less_than_a_second_of_the_processor(db, kind, values, size, light):
    given = values_of(kind, {**REPLAY, **values})
    upload = trace(size) if size else None
    assert is_light(kind, given, upload) is light
    began_s = time.process_time()
    row = actions.ask(kind=kind, title="x", values=given, actor=ADA, now=timezone.now(), upload=upload)
    took_s = time.process_time() - began_s
    print(f"\n  {kind}, {given['source']}: {took_s:.3f} s of the processor")
    assert took_s < 1 and row.prepared is light
    assert (UPLOAD in row.inputs) is (size > 0 and not light)


@pytest.mark.django_db(transaction=True)
def test_a_large_file_is_read_by_the_worker_and_kept_as_it_came():
    upload = trace(LIGHT_BYTES + 20_000)
    given = values_of("replay", {**REPLAY, "source": "file"})
    row = actions.ask(kind="replay", title="x", values=given, actor=ADA, now=timezone.now(), upload=upload)
    first = row.inputs[UPLOAD]
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "done", row.problem
    assert row.inputs == {TRACE: first} and "(azure)" in row.source


def test_too_much_and_nothing_to_fit_are_told_by_the_request(people):
    for values, said in (
        ({"minutes": "600", "rate_per_s": "100"}, "this kind takes 100,000"),
        ({"minutes": "100", "rate_per_s": "10", "service_model": "fitted"}, "Only recorded usage can be fitted"),
    ):
        response = people["admin"].post(reverse("lab-new", args=["replay"]), {**REPLAY, **values})
        assert response.status_code == 422 and said in response.text
    assert not Experiment.objects.exists()
