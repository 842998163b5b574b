"""`manage.py lab`: answers for people and as JSON, and one line for what cannot be used."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from tests.lab.nights import azure_file, mooncake_file


def lab(*arguments: object) -> str:
    out = StringIO()
    call_command("lab", *map(str, arguments), stdout=out)
    return out.getvalue()


def test_replay_answers_in_words_and_as_json(tmp_path):
    path = azure_file(tmp_path, 300)
    said = lab("replay", "--trace", path, "--slots", 2, "--objective-ms", 700)
    assert "no GPU was involved" in said and "wait p99, ms" in said
    answer = json.loads(lab("replay", "--trace", path, "--slots", 2, "--objective-ms", 700, "--json"))
    assert answer["result"]["all"]["arrivals"] == 300 and answer["policy"] == "fifo"


def test_two_policies_stand_side_by_side(tmp_path):
    path, night = azure_file(tmp_path, 200), mooncake_file(tmp_path, 60)
    arguments = (
        "replay", "--trace", path, "--job", f"{night}:deadline_h=0.5", "--slots", 4, "--per-slot", 4, "--policy",
        "reserved", "--safe-rate", "2=20,4=40", "--propose", "pool.flex.max_lent=0",
    )  # fmt: skip
    answer = json.loads(lab(*arguments, "--json"))
    assert answer["against"]["set"] == {"pool.flex.max_lent": 0}
    assert {row["of"] for row in answer["effects"]} == {"class interactive", "pool", "job mooncake"}
    said = lab(*arguments)
    assert "job mooncake: 60 of 60 items" in said and "against reserved" in said


def test_batching_answers_its_documented_question():
    answer = json.loads(lab("batching", "--requests", 500, "--rate", 200, "--seed", 42, "--json"))
    assert answer["cells"][0]["max_batch_size"] == 1 and {"p50_ms", "p95_ms", "p99_ms"} <= answer["cells"][0].keys()
    assert "<- knee" in lab("batching", "--requests", 100)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("replay",), "--trace"),
        (("replay", "--trace", "nowhere.csv"), "nowhere.csv: No such file"),
        (("replay", "--trace", "nowhere.csv", "--slots", "0"), "--slots is 1 or more"),
        (("batching", "--requests", "0"), "requests are 1"),
        (("interference", "--trace", "x.csv", "--target", "2"), "--target lies"),
        (("designs", "--trace", "x.csv", "--slots", "2", "--floor", "interactive=3"), "x.csv: No such file"),
        (("overload", "--trace", "x.csv"), "x.csv: No such file"),
        (("capacity", "--trace", "x.csv", "--forecast", "0"), "--target lies between 0 and 1, --forecast is above 0"),
        (("replay", "--trace", "x.csv", "--service", "speed=1"), "speed=1"),
        (("replay", "--trace", "x.csv", "--fail", "S01"), "x.csv: No such file"),
        (("overload", "--trace", "x.csv", "--silent", "5"), "x.csv: No such file"),
        (("offers", "--offers", "x.csv", "--gpu", "H100", "--count", "1"), "x.csv: No such file"),
        (
            ("live", "--agent", "http://x", "--model", "m", "--trace", "x", "--raw", "r", "--key-env", "NO_SUCH"),
            "the environment has no NO_SUCH",
        ),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line_with_status_2(arguments, said):
    with pytest.raises(CommandError, match=said) as error:
        lab(*arguments)
    assert error.value.returncode == 2 and "\n" not in str(error.value)
