"""Capacity offers as experiments: asked on the page and over REST, run, shown with their reasons, and asked again."""

from __future__ import annotations

import json

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.urls import reverse

from controlplane.experiments import running
from controlplane.experiments.models import Experiment
from controlplane.experiments.queries import answer_of
from tests.experiments.test_pages import SMALL, asked, page
from tests.lab.nights import azure_file
from tests.lab.test_offers import listing

API = "/api/v1/lab/experiments/"
OFFERS = {
    "title": "Eight A100", "gpus_per_slot": "1", "count": "8", "gpu": "A100", "memory_gb": "80", "hours": "730",
}  # fmt: skip


def price_list(content: bytes | None = None) -> SimpleUploadedFile:
    return SimpleUploadedFile("prices.csv", content or listing(), "text/csv")


@pytest.mark.django_db(transaction=True)
def test_offers_from_the_form_to_the_page(people):
    row = asked(people["finance"], "offers", {**OFFERS, "file": price_list(), "one_node": "on"})
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "done" and row.source == "list prices.csv" and row.seed == 0
    shown = page(people["viewer"], row)
    assert "8 x A100, at least 80 GB each, in one machine, for 730 h, on demand" in shown
    assert shown.index("South s8") < shown.index("North n8") and "a GPU has 40 GB, 80 are needed" in shown
    assert "Line 10 was left out" in shown and "Simulated" not in shown
    again = people["finance"].post(reverse("experiment-rerun", args=[row.pk]))
    assert again.status_code == 302
    newest = Experiment.objects.latest("id")
    assert running.run(newest.pk)
    both = people["viewer"].get(reverse("lab-compare"), {"a": row.pk, "b": newest.pk}).text
    assert "A machine, an hour" in both


@pytest.mark.django_db(transaction=True)
def test_what_a_capacity_test_measured_is_the_requirement(people):
    test = asked(people["admin"], "capacity", {**SMALL, "minutes": "1", "batch_items": "5"})
    assert running.run(test.pk)
    link = f"{reverse('lab-new', args=['offers'])}?of={test.pk}"
    assert link in page(people["admin"], test) and link not in page(people["viewer"], test)
    assert f'value="{test.pk}"' in people["admin"].get(link).text
    values = {name: value for name, value in OFFERS.items() if name != "count"}
    row = asked(
        people["admin"], "offers", {**values, "file": price_list(), "experiment": str(test.pk), "gpus_per_slot": "2"}
    )
    assert running.run(row.pk)
    row.refresh_from_db()
    slots = answer_of(test)["with_one_failed"]
    found = answer_of(row)["requirement"]
    assert found["count"] == 2 * slots and f"{slots} slots" in found["measured_by"]
    # The answer that measured is kept among the inputs, so it can be computed again.
    assert row.inputs["capacity.json"] == test.result.sha256


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file": ""}, "Choose a price list."), ({"gpu": "", "memory_gb": "0"}, "Name a GPU type"),
        ({"count": ""}, "Give either"), ({"experiment": "7"}, "Give either"),
        ({"experiment": "7", "count": ""}, "no such capacity test"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_beside_its_field(people, changes, said):
    values = {**OFFERS, "file": price_list(), **changes}
    response = people["admin"].post(reverse("lab-new", args=["offers"]), {k: v for k, v in values.items() if v != ""})
    assert response.status_code == 422 and said in response.text and not Experiment.objects.exists()


@pytest.mark.django_db
def test_a_list_that_is_none_is_refused(people):
    values = {**OFFERS, "file": price_list(b"a,b\r\n1,2\r\n")}
    response = people["admin"].post(reverse("lab-new", args=["offers"]), values)
    assert response.status_code == 422 and "names no column cloud" in response.text


# ---- REST ----


def upload(client, kind: str, parameters: object, file=None, **headers):
    text = parameters if isinstance(parameters, str) else json.dumps(parameters)
    data = {"kind": kind, "title": "x", "parameters": text, **({} if file is None else {"file": file})}
    return client.post(API, data, headers=headers)


@pytest.mark.django_db(transaction=True)
def test_a_trace_is_uploaded_over_rest_and_replayed(people, tmp_path):
    content = azure_file(tmp_path, 120).read_bytes()
    parameters = {"source": "file", "policy": "fifo", "batch_items": 0, "service_model": "h100"}
    headers = {"Idempotency-Key": "trace"}
    first = upload(people["oncall"], "replay", parameters, SimpleUploadedFile("azure.csv", content), **headers)
    again = upload(people["oncall"], "replay", parameters, SimpleUploadedFile("azure.csv", content), **headers)
    assert first.status_code == 201, first.content
    assert again.json()["id"] == first.json()["id"] and Experiment.objects.count() == 1
    other = upload(people["oncall"], "replay", parameters, SimpleUploadedFile("azure.csv", content[:2_000]), **headers)
    assert other.status_code == 422
    assert first.json()["source"].startswith("file azure.csv (azure), 120 requests")
    assert running.run(first.json()["id"])
    found = people["viewer"].get(f"{API}{first.json()['id']}/").json()
    assert found["answer"]["result"]["all"]["arrivals"] == 120


@pytest.mark.django_db(transaction=True)
def test_what_goes_wrong_in_a_replay_is_asked_and_shown(people):
    conditions = {"fail": "S01@5+20\nS02@9", "standby": "1", "start_up_lag_s": "10", "report_every_s": "2",
                  "report_loss_percent": "10"}  # fmt: skip
    values = {**SMALL, "policy": "reserved", "minutes": "1", "batch_items": "5", **conditions}
    row = asked(people["oncall"], "replay", values)
    wanted = ["--fail=S01@5+20", "--fail=S02@9", "--standby=1", "--start-up-lag-s=10", "--report-every-s=2",
              "--report-loss=0.1"]  # fmt: skip
    assert [one for one in row.arguments if one in wanted] == wanted
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "done", row.problem
    assert "Slots that broke" in page(people["viewer"], row)
    assert answer_of(row)["result"]["faults"]["slots_broken"] == 2
    wrong = people["oncall"].post(reverse("lab-new", args=["replay"]), {**values, "fail": "S01"})
    assert wrong.status_code == 422 and "SLOT@SECONDS" in wrong.text


@pytest.mark.django_db(transaction=True)
def test_client_windows_are_expanded_by_a_worker(people):
    rows = ["client_id,window_start_s,rate_rps,cv,distribution,param_shape,param_scale", "4,0,0.5,1,Gamma,1,2",
            "9,0,0.25,1,Weibull,0.5,2", "9,600,0.25,1,Weibull,0.5,2"]  # fmt: skip
    parameters = {"source": "file", "policy": "fifo", "batch_items": 0, "minutes": 10, "seed": 3}
    file = SimpleUploadedFile("windows.csv", "\n".join(rows).encode())
    made = upload(people["oncall"], "replay", parameters, file)
    assert made.status_code == 201 and not made.json()["prepared"]
    assert running.run(made.json()["id"])
    row = Experiment.objects.get(pk=made.json()["id"])
    assert row.state == "done", row.problem
    assert row.source.startswith("file windows.csv (servegen), 450 requests") and "for_h=0.166667" in row.arguments[-1]
    assert answer_of(row)["result"]["all"]["arrivals"] == 450


@pytest.mark.django_db(transaction=True)
def test_offers_are_asked_over_rest(people):
    made = upload(people["finance"], "offers", {"count": 8, "gpu": "A100", "memory_gb": 80}, price_list())
    assert made.status_code == 201, made.content
    assert running.run(made.json()["id"])
    answer = people["viewer"].get(f"{API}{made.json()['id']}/").json()["answer"]
    assert [row["name"] for row in answer["feasible"]] == ["s8", "s1", "w2", "n8"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("kind", "parameters", "file", "field"),
    [
        ("replay", {"source": "file"}, None, "file"), ("replay", "[1", None, "parameters"),
        ("replay", "[1]", None, "parameters"), ("batching", {}, b"x", "file"),
        ("replay", {"source": "file"}, b"no trace", "file"),
        ("replay", {"source": "file"}, b"x" * ((4 << 20) + 1), "file"),
        ("offers", {"count": 1, "gpu": "A100"}, b"a,b\n1,2\n", "file"),
        ("offers", {"count": 1, "gpu": "A100"}, None, "file"),
    ],
)  # fmt: skip
def test_a_file_is_checked_as_on_the_page(people, kind, parameters, file, field):
    given = None if file is None else SimpleUploadedFile("f.csv", file)
    answer = upload(people["admin"], kind, parameters, given)
    assert answer.status_code == 400, answer.content
    assert field in answer.json()["errors"] and not Experiment.objects.exists()


@pytest.mark.django_db
def test_who_may_not_ask_may_not_upload(people):
    assert upload(people["viewer"], "offers", {"count": 1, "gpu": "A100"}, price_list()).status_code == 403
    assert upload(people["tenant"], "offers", {"count": 1, "gpu": "A100"}, price_list()).status_code == 403
