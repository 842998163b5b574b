"""The lab's pages: ask, progress, answer, verdict, compare, again, share, and the safe rate that is used."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.urls import reverse

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.experiments import actions, running
from controlplane.experiments.models import Experiment, ExperimentResult, InputFile
from controlplane.experiments.queries import answer_of, safe_rates_of
from controlplane.fleet.models import Pool
from controlplane.usage.models import UsageRecord
from tests import factories

ADA = Actor(id=None, name="ada", role="admin")
SMALL = {
    "title": "May we grow", "seed": "7", "source": "code", "minutes": "2", "rate_per_s": "2", "tenants": "3",
    "batch_items": "20", "deadline_h": "1", "slots": "4", "per_slot": "4", "kv_tokens": "0", "floor_interactive": "2",
    "floor_batch": "1", "service_model": "h100", "base_ms": "50", "prompt_us": "125", "output_us": "30000",
    "objective_ms": "6000", "target_percent": "90", "quality_percent": "5", "forecast": "1.2",
}  # fmt: skip
BATCHING = {
    "title": "Batches", "seed": "42", "requests": "300", "rate": "200", "fixed_ms": "4", "per_input_ms": "0.5",
    "workers": "1", "slow": "1", "burst": "1",
}  # fmt: skip


def asked(client, kind: str, values: dict[str, str]) -> Experiment:
    response = client.post(reverse("lab-new", args=[kind]), values)
    assert response.status_code == 302, response.content.decode()
    return Experiment.objects.latest("id")


def page(client, row: Experiment) -> str:
    response = client.get(reverse("experiment", args=[row.pk]))
    assert response.status_code == 200
    return response.content.decode()


@pytest.mark.django_db(transaction=True)
def test_an_interference_test_from_the_form_to_the_guard(people):
    admin, viewer = people["admin"], people["viewer"]
    row = asked(admin, "interference", SMALL)
    assert "It waits for a worker" in page(viewer, row) and "Cancel it" not in page(viewer, row)
    assert running.run(row.pk) and not running.run(row.pk)
    row.refresh_from_db()
    assert (row.state, row.problem, row.progress) == ("done", "", 1.0)
    shown = page(admin, row)
    answer = answer_of(row)
    assert "Verdict" in shown and "no GPU was involved" in shown and row.result.sha256 in shown
    printed = admin.get(reverse("experiment-verdict", args=[row.pk])).text
    assert "Do not buy if isolation restores" in printed and "90 % within 6,000 ms" in printed
    # What is folded is not on paper.
    assert "open><summary>The command" in printed and "open><summary>The command" not in shown
    rates = safe_rates_of(answer)
    assert rates and list(rates.values()) == sorted(rates.values())

    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    pool = factories.pool()
    for number, band in enumerate(("interactive", "interactive", "flex", "batch")):
        factories.slot(pool, f"s{number}", band)
    use = reverse("experiment-safe-rate", args=[row.pk])
    assert viewer.post(use, {"pool": pool.slug, "days": "30", "reason": "x"}).status_code == 403
    assert admin.post(use, {"pool": pool.slug, "days": "0", "reason": "x"}).status_code == 422
    assert admin.post(use, {"pool": pool.slug, "days": "30", "reason": "tested"}).status_code == 302
    stored = Pool.objects.get(pk=pool.pk).safe_rate
    assert stored["entries"] == rates and stored["trace"].startswith(f"experiment {row.pk}: synthetic code completion")
    assert stored["measured_at"] == row.result.created_at.isoformat() and stored["valid_until"] > stored["measured_at"]
    entry = AuditEntry.objects.filter(action="pool.edit").latest("id")
    assert entry.reason == "tested" and entry.after["safe_rate"]["entries"] == rates

    assert admin.post(reverse("experiment-rerun", args=[row.pk])).status_code == 302
    again = Experiment.objects.latest("id")
    assert running.run(again.pk)
    again.refresh_from_db()
    assert again.rerun_of == row and again.result.sha256 == row.result.sha256 and "Same bytes" in page(viewer, again)
    both = viewer.get(reverse("lab-compare"), {"a": row.pk, "b": again.pk}).text
    assert "Figure by figure" in both and "Admitted, requests/s" in both
    assert '<td class="num">—</td><td class="num">—</td>' not in both, "neither has it"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kind", ["replay", "overload", "designs", "capacity", "batching"])
def test_each_kind_is_asked_run_shown_and_computed_again_to_the_byte(people, kind):
    values = BATCHING if kind == "batching" else {**SMALL, "minutes": "1", "batch_items": "5"}
    if kind == "replay":
        values = {**values, "policy": "reserved", "against": "shared", "propose": "pool.flex.max_lent=0\n",
                  "safe_rate": "2=4, 3=8"}  # fmt: skip
    row = asked(people["oncall"], kind, values)
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "done", row.problem
    shown = page(people["viewer"], row)
    assert "What it is made of" in shown and not re.search(r"<th[^>]*></th>", shown)
    out = StringIO()
    call_command("lab", "rerun", str(row.pk), stdout=out)
    assert out.getvalue().encode() == bytes(row.result.content)
    as_json = people["viewer"].get(reverse("experiment", args=[row.pk]), {"json": "1"})
    assert as_json.content == bytes(row.result.content)


@pytest.mark.django_db(transaction=True)
def test_a_rerun_that_gives_other_bytes_is_told(people):
    row = asked(people["admin"], "batching", BATCHING)
    running.run(row.pk)
    Experiment.objects.filter(pk=row.pk).update(arguments=[*row.arguments[:-1], "--burst=2"])
    with pytest.raises(CommandError, match="not the one that is stored"):
        call_command("lab", "rerun", str(row.pk), stdout=StringIO())
    with pytest.raises(CommandError, match="no experiment 999999"):
        call_command("lab", "rerun", "999999")


@pytest.mark.django_db(transaction=True)
def test_a_running_experiment_is_killed_when_it_is_cancelled(people):
    row = asked(people["admin"], "interference", {**SMALL, "minutes": "60", "rate_per_s": "5"})
    found = []

    def work() -> None:
        found.append(running.run(row.pk))
        connection.close()

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 60
    while Experiment.objects.get(pk=row.pk).progress == 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert "Simulated" in page(people["viewer"], row)
    part = people["viewer"].get(reverse("experiment", args=[row.pk]), headers={"HX-Request": "true"}).text
    assert "experiment-progress" in part and "<html" not in part
    assert people["oncall"].post(reverse("experiment-cancel", args=[row.pk])).status_code == 302
    thread.join(60)
    assert found == [True] and not thread.is_alive()
    row.refresh_from_db()
    assert row.state == "cancelled" and not hasattr(row, "result")
    with pytest.raises(actions.Over):
        actions.cancel(experiment_id=row.pk, actor=ADA, now=factories.NOW)


@pytest.mark.django_db(transaction=True)
def test_one_that_takes_too_long_fails_and_says_so(people, monkeypatch):
    monkeypatch.setattr(running, "TIME_LIMIT_S", 0.1)
    row = asked(people["admin"], "interference", {**SMALL, "minutes": "60", "rate_per_s": "5"})
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "failed" and "It took longer than" in row.problem
    assert "It could not be answered" in page(people["viewer"], row)


@pytest.mark.django_db(transaction=True)
def test_no_more_than_two_run_at_once_and_a_lost_one_is_taken_up(people):
    rows = [asked(people["admin"], "batching", BATCHING) for _ in range(3)]
    at = rows[0].created_at
    Experiment.objects.filter(pk__in=[row.pk for row in rows[:2]]).update(state="running", started_at=at, seen_at=at)
    assert not running.run(rows[2].pk)
    Experiment.objects.filter(pk=rows[0].pk).update(seen_at=at - timedelta(minutes=5))
    assert rows[0].pk in running.waiting(at + timedelta(seconds=1))
    assert running.run(rows[0].pk)
    assert Experiment.objects.get(pk=rows[0].pk).state == "done"


@pytest.mark.django_db(transaction=True)
def test_inputs_and_answers_are_only_ever_added(people):
    row = asked(people["admin"], "replay", {**SMALL, "policy": "fifo", "batch_items": "0"})
    running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "done", row.problem
    for rows in (InputFile.objects.all(), ExperimentResult.objects.all()):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            rows.delete()
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            rows.update(created_at=factories.NOW)
    count = InputFile.objects.count()
    asked(people["admin"], "replay", {**SMALL, "policy": "priority", "batch_items": "0"})
    assert InputFile.objects.count() == count, "equal inputs are kept once"


def test_what_cannot_be_asked_is_said_on_its_field_and_input_is_kept(people):
    for values, said in (
        ({"title": ""}, "This field is required"), ({"floor_batch": "9"}, "The floors need 11 slots, there are 4"),
        ({"minutes": "600", "rate_per_s": "100"}, "this kind takes 20,000"),
        ({"source": "usage"}, "Choose a pool whose usage is replayed"), ({"source": "file"}, "Choose a trace file"),
        ({"service_model": "fitted"}, "Only recorded usage can be fitted"),
    ):  # fmt: skip
        response = people["admin"].post(reverse("lab-new", args=["interference"]), {**SMALL, **values})
        assert response.status_code == 422 and said in response.text
        assert "error-summary" in response.text and 'name="objective_ms" value="6000"' in response.text
    bad = people["admin"].post(
        reverse("lab-new", args=["replay"]), {**SMALL, "policy": "reserved", "propose": "nonsense"}
    )
    assert bad.status_code == 422 and "write path=value" in bad.text
    assert not Experiment.objects.exists() and people["admin"].get("/lab/new/nothing/").status_code == 404


@pytest.mark.django_db(transaction=True)
def test_a_trace_file_is_kept_and_its_bad_lines_are_counted(people, tmp_path):
    path = tmp_path / "azure.csv"
    lines = [f"2026-10-31 10:00:{at:02}.0000000,{50 + at},{10 + at}" for at in range(40)]
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join([*lines, "x,1,2"]) + "\n")
    with path.open("rb") as file:
        row = asked(people["admin"], "replay", {**SMALL, "source": "file", "policy": "fifo", "file": file,
                                                "batch_items": "0"})  # fmt: skip
    assert row.source == "file azure.csv (azure), 40 requests, 1 lines left out"
    assert running.run(row.pk)
    row.refresh_from_db()
    assert answer_of(row)["result"]["all"]["arrivals"] == 40 and "line 42" in page(people["viewer"], row)


@pytest.mark.django_db(transaction=True)
def test_a_link_shows_the_answer_and_nothing_to_press(people, client):
    row = asked(people["admin"], "batching", BATCHING)
    running.run(row.pk)
    address = reverse("experiment-share", args=[row.pk])
    people["admin"].post(address, {"shared": "1"})
    people["admin"].post(address, {"shared": "1"})
    row.refresh_from_db()
    link = reverse("lab-shared", args=[row.share_token])
    shown = people["viewer"].get(link).text
    assert "p95 by the longest wait" in shown and "Run again" not in shown and "Withdraw" not in shown
    assert client.get(link).status_code == 302 and people["tenant"].get(link).status_code == 403
    people["admin"].post(address, {"shared": "0"})
    assert people["viewer"].get(link).status_code == 404


def test_the_list_filters_and_pages(people, django_assert_num_queries):
    for number in range(30):
        Experiment.objects.create(
            kind="batching" if number % 2 else "replay", title=f"one {number}", parameters={}, arguments=[], seed=1,
            state="done", created_at=factories.NOW, created_by="ada",
        )  # fmt: skip
    viewer = people["viewer"]
    viewer.get(reverse("lab"))
    with django_assert_num_queries(6):
        first = viewer.get(reverse("lab")).text
    assert "one 29" in first and "one 4<" not in first and "Older" in first
    only = viewer.get(reverse("lab"), {"kind": "replay"}).text
    assert "one 28" in only and "one 29" not in only
    assert "No experiment fits" in viewer.get(reverse("lab"), {"state": "failed"}).text


def test_the_effect_of_a_draft_stands_on_its_review(served, until, people):
    admin = people["admin"]
    assert "The draft changes no pool" in admin.get(reverse("draft-effect")).text
    pool = served.pool
    served.chat.max_prompt_tokens = 1_000
    served.chat.save(update_fields=["max_prompt_tokens"])
    assert reverse("draft-effect") in admin.get(reverse("policy-review")).text
    before = admin.get(reverse("draft-effect")).text
    assert pool.slug in before and "Simulate the draft" in before
    assert "Simulate the draft" not in people["viewer"].get(reverse("draft-effect")).text
    asked_for = admin.post(reverse("draft-effect"), {"minutes": "60"}, headers={"HX-Request": "true"}).text
    assert "It waits for a worker" in asked_for and "every 2s" in asked_for
    row = Experiment.objects.get()
    assert running.run(row.pk)
    row.refresh_from_db()
    assert row.state == "done", row.problem
    answer = answer_of(row)
    long = UsageRecord.objects.filter(prompt_tokens__gt=1_000, job_id=0).count()
    refused = {side: answer[side]["classes"]["chat"]["refused"] for side in ("current", "draft")}
    assert refused["draft"]["prompt_too_long"] == long > 0 and "prompt_too_long" not in refused["current"]
    assert answer["draft"]["charge_nanos"] < answer["current"]["charge_nanos"]
    after = admin.get(reverse("draft-effect")).text
    assert "chat: refused" in after and "every 2s" not in after and "Charges" in after
    assert "By tenant and class" in page(admin, row)
    bad = admin.post(reverse("draft-effect"), {"minutes": "x"}, headers={"HX-Request": "true"}).text
    assert "Enter a length" in bad
    empty = json.loads(row.result.content)["load"]
    assert empty["whole"] and empty["requests"] == 240 and empty["items"] == 80
