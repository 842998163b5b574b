"""REST of experiments: list, create, get, cancel and rerun, with roles, idempotency and problems by field."""

from __future__ import annotations

import pytest

from controlplane.experiments import running
from controlplane.experiments.models import Experiment

URL = "/api/v1/lab/experiments/"
ASK = {"kind": "batching", "title": "Batches", "parameters": {"requests": 200, "rate": 150.5}}


def post(client, url, body=None, **headers):
    return client.post(url, body or {}, content_type="application/json", headers=headers)


@pytest.mark.django_db(transaction=True)
def test_an_experiment_is_asked_once_run_read_and_asked_again(people):
    oncall = people["oncall"]
    made = post(oncall, URL, ASK, **{"Idempotency-Key": "one"})
    assert made.status_code == 201 and made.json()["state"] == "waiting" and made.json()["sha256"] is None
    assert post(oncall, URL, ASK, **{"Idempotency-Key": "one"}).json()["id"] == made.json()["id"]
    other = post(oncall, URL, {**ASK, "title": "Other"}, **{"Idempotency-Key": "one"})
    assert other.status_code == 422 and Experiment.objects.count() == 1
    assert "--rate=150.5" in made.json()["arguments"] and "--seed=42" in made.json()["arguments"]
    address = f"{URL}{made.json()['id']}/"
    assert people["viewer"].get(address).json()["answer"] is None
    running.run(made.json()["id"])
    found = people["viewer"].get(address).json()
    assert found["state"] == "done" and found["answer"]["cells"] and len(found["sha256"]) == 64
    again = post(oncall, f"{address}rerun/")
    assert again.status_code == 201 and again.json()["rerun_of"] == found["id"]
    assert post(oncall, f"{URL}{again.json()['id']}/cancel/").json()["state"] == "cancelled"
    over = post(oncall, f"{address}cancel/")
    assert over.status_code == 409 and over["Content-Type"] == "application/problem+json"
    rows = people["viewer"].get(URL, {"kind": "batching", "state": "done"}).json()["results"]
    assert [row["id"] for row in rows] == [found["id"]] and "answer" not in rows[0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**ASK, "parameters": {"speed": 1}}, "speed"), ({**ASK, "parameters": {"rate": "fast"}}, "rate"),
        ({**ASK, "parameters": {"rate": [1]}}, "rate"), ({**ASK, "parameters": {"requests": 10**9}}, "requests"),
        ({"kind": "replay", "title": "x", "parameters": {"source": "file"}}, "file"),
        ({"kind": "effect", "title": "x", "parameters": {}}, "pool"),
        ({"kind": "nothing", "title": "x"}, "kind"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_a_problem_by_field(people, body, field):
    answer = post(people["admin"], URL, body)
    assert answer.status_code == 400 and answer["Content-Type"] == "application/problem+json"
    assert field in answer.json()["errors"] and not Experiment.objects.exists()


@pytest.mark.parametrize("kind", ["interference", "replay", "overload", "designs", "capacity"])
def test_defaults_alone_are_a_question(people, kind):
    made = post(people["admin"], URL, {"kind": kind, "title": "x", "parameters": {"minutes": 5}})
    assert made.status_code == 201, made.content
    assert made.json()["source"].startswith("synthetic code completion")


def test_a_viewer_reads_and_does_not_ask(people):
    assert post(people["viewer"], URL, ASK).status_code == 403 and people["viewer"].get(URL).status_code == 200
    assert people["tenant"].get(URL).status_code == 403
