"""Classes and contracts: the rules of each action, versions and effective dates, and the audit entry."""

import threading
from datetime import time, timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import connection

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.contracts import actions, queries
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.tenants.actions import Stale
from controlplane.tenants.models import Installation
from controlplane.wakeups import bells
from tests import factories

ADA = Actor(id=None, name="ada", role="admin")
TTFT = {"target_ppm": 990_000, "metric": "ttft", "threshold_ms": 900, "window_s": 900, "load_limit_per_s": 18.0}


def codes(error) -> dict[str, list[str]]:
    return {field: [item.code for item in items] for field, items in error.value.error_dict.items()}


def make_class(now, slug="chat", kind="interactive", **values):
    return actions.create_class(slug=slug, kind=kind, values=values, actor=ADA, now=now)


def edit_class(now, slug="chat", reason="because", version=None, **values):
    return actions.edit_class(slug=slug, values=values, actor=ADA, now=now, reason=reason, version=version)


@pytest.fixture
def chat(installation, now):
    return make_class(now, name="Chat")


@pytest.fixture
def contract(chat, now):
    return actions.create_contract(slug="chat-ttft", class_slug="chat", values=TTFT, actor=ADA, now=now)


def add_version(now, reason="launch", version=None, effective_from=None, **values):
    return actions.add_version(
        slug="chat-ttft", values=values, actor=ADA, now=now, reason=reason, version=version,
        effective_from=effective_from,
    )  # fmt: skip


# ---- classes ----


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"min_share_ppm": 1_000_001}, "min_share_ppm", "out_of_range"),
        ({"default_output_tokens": 4_000}, "default_output_tokens", "out_of_range"),
        ({"overload": "downgrade"}, "downgrade_to", "downgrade_missing"),
        ({"retry_safe": True, "cancellable": False}, "retry_safe", "retry_needs_cancel"),
        ({"stage_timeout_s": 0}, "stage_timeout_s", "out_of_range"),
    ],
)
def test_a_rule_that_does_not_hold_is_named(chat, now, values, field, rule):
    with pytest.raises(ValidationError) as error:
        edit_class(now, **values)
    assert codes(error) == {field: [rule]}


def test_downgrades_in_a_circle_are_refused_with_the_circle(chat, now):
    second = make_class(now, "second", overload="downgrade", downgrade_to=chat)
    third = make_class(now, "third", overload="downgrade", downgrade_to=second)
    with pytest.raises(ValidationError) as error:
        edit_class(now, overload="downgrade", downgrade_to=third)
    assert codes(error) == {"downgrade_to": ["downgrade_cycle"]}
    assert "chat → third → second → chat" in str(error.value)
    with pytest.raises(ValidationError):
        edit_class(now, downgrade_to=chat)


def test_a_minimum_share_over_the_floor_of_a_reserved_pool_is_refused(chat, now):
    make_class(now, "bulk", "batch")
    pool = factories.pool("pool")
    for name, band in (("i1", "interactive"), ("i2", "interactive"), ("b1", "batch"), ("f1", "flex")):
        factories.slot(pool, name, band)
    with pytest.raises(ValidationError) as error:
        edit_class(now, "bulk", min_share_ppm=300_000)
    assert codes(error) == {"min_share_ppm": ["floors_over_slots"]}
    assert edit_class(now, "bulk", min_share_ppm=250_000).min_share_ppm == 250_000


def test_suspending_takes_the_next_live_number_and_rings(chat, now, monkeypatch, django_capture_on_commit_callbacks):
    rung = []
    monkeypatch.setattr(bells, "ring_now", lambda task, **ids: rung.append(task))
    with django_capture_on_commit_callbacks(execute=True):
        row = actions.suspend_class(slug="chat", actor=ADA, now=now, reason="runaway client")
    assert (row.state, row.live_number) == ("suspended", Installation.objects.get().live_number)
    assert rung == ["policy.sign_live"]
    actions.suspend_class(slug="chat", actor=ADA, now=now, reason="again")
    resumed = actions.resume_class(slug="chat", actor=ADA, now=now, reason="fixed")
    assert resumed.live_number == row.live_number + 1
    assert [entry.action for entry in AuditEntry.objects.filter(noun="class").order_by("id")] == [
        "class.create",
        "class.suspend",
        "class.resume",
    ]


def test_a_class_in_use_is_not_archived(contract, now):
    factories.tenant("acme")
    with pytest.raises(ValidationError) as error:
        actions.archive_class(slug="chat", actor=ADA, now=now, reason="old")
    assert "contract chat-ttft, tenant acme" in str(error.value)


def test_an_edit_of_another_version_is_stale(chat, now):
    edit_class(now, version=1, max_queue=10)
    with pytest.raises(Stale):
        edit_class(now, version=1, max_queue=20)
    assert WorkloadClass.objects.get().max_queue == 10


@pytest.mark.django_db(transaction=True)
def test_two_edits_at_once_cannot_close_a_circle(installation, now):
    first, second = make_class(now, "first"), make_class(now, "second")
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def point(slug: str, target: WorkloadClass) -> None:
        barrier.wait()
        try:
            edit_class(now, slug, overload="downgrade", downgrade_to=target)
            outcomes.append("saved")
        except ValidationError:
            outcomes.append("refused")
        finally:
            connection.close()

    threads = [
        threading.Thread(target=point, args=("first", second)),
        threading.Thread(target=point, args=("second", first)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["refused", "saved"]


# ---- contracts ----


def test_a_contract_begins_with_version_1_and_reads_aloud_in_the_audit_log(contract, now):
    version = ContractVersion.objects.get()
    assert (version.number, version.effective_from) == (1, now)
    entry = AuditEntry.objects.filter(action="contract.create").get()
    assert entry.after["reads"] == (
        "At least 99\xa0% of offered requests start streaming within 900\xa0ms, over any 15\xa0min, while admitted"
        " load is at most 18 requests per second. Refused and timed-out requests count against it."
    )


def test_a_new_version_leaves_the_old_one_as_it_was(contract, now):
    later = now + timedelta(days=1)
    row = add_version(now, effective_from=later, threshold_ms=700)
    first = ContractVersion.objects.get(number=1)
    assert (first.threshold_ms, row.threshold_ms, row.target_ppm) == (900, 700, 990_000)
    assert queries.version_at(contract, later - timedelta(seconds=1)) == first
    assert queries.version_at(contract, later) == row
    standing = queries.standings([contract], now)[0]
    assert (standing.in_force, standing.next) == (first, row)
    entry = AuditEntry.objects.filter(action="contract.version").get()
    assert entry.before == {"number": 1, "threshold_ms": 900}
    assert (entry.after["threshold_ms"], entry.reason) == (700, "launch")


def test_a_version_begins_after_the_one_before_and_never_in_the_past(contract, now):
    add_version(now, effective_from=now + timedelta(days=2), threshold_ms=700)
    with pytest.raises(ValidationError, match="Version 2 begins at"):
        add_version(now, effective_from=now + timedelta(days=1), threshold_ms=600)
    with pytest.raises(ValidationError, match="an instant ahead"):
        add_version(now, effective_from=now - timedelta(seconds=1), threshold_ms=600)


def test_a_version_that_changes_nothing_is_refused(contract, now):
    with pytest.raises(ValidationError, match="Nothing differs"):
        add_version(now + timedelta(hours=1), threshold_ms=900)


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"target_ppm": 0}, "target_ppm", "out_of_range"),
        ({"target_ppm": 1_000_000}, "target_ppm", "out_of_range"),
        ({"threshold_ms": 0}, "threshold_ms", "out_of_range"),
        ({"window_s": 61}, "window_s", "out_of_range"),
        ({"load_limit_per_s": 0.0}, "load_limit_per_s", "out_of_range"),
        ({"objective": "deadline"}, "objective", "class_kind_mismatch"),
    ],
)
def test_a_promise_that_cannot_be_is_refused(contract, now, values, field, rule):
    with pytest.raises(ValidationError) as error:
        add_version(now + timedelta(hours=1), **values)
    assert codes(error) == {field: [rule]}


def test_a_deadline_contract_needs_its_clocks_and_a_known_zone(installation, now):
    make_class(now, "bulk", "batch")
    values = {"objective": "deadline", "target_ppm": 980_000, "zone": "Mars/Base"}
    with pytest.raises(ValidationError) as error:
        actions.create_contract(slug="nightly", class_slug="bulk", values=values, actor=ADA, now=now)
    assert codes(error) == {"admitted_before": ["required"], "finished_by": ["required"], "zone": ["zone_unknown"]}
    values |= {"zone": "Europe/Berlin", "admitted_before": time(20), "finished_by": time(6)}
    actions.create_contract(slug="nightly", class_slug="bulk", values=values, actor=ADA, now=now)
    entry = AuditEntry.objects.filter(action="contract.create").get()
    assert entry.after["reads"].startswith("At least 98\xa0% of jobs admitted before 20:00 finish by 06:00 (Europe/Be")


def test_an_ended_contract_takes_no_version(contract, now):
    actions.archive_contract(slug="chat-ttft", actor=ADA, now=now, reason="over")
    assert Contract.objects.get().archived_at == now
    with pytest.raises(ValidationError):
        add_version(now + timedelta(hours=1), threshold_ms=700)


def test_a_pool_whose_lending_limit_leaves_no_room_is_warned_about(contract, now):
    pool = factories.pool("pool", lend_p95_ms=200)
    assert queries.room_warnings(pool, now) == []
    pool.lend_p95_ms = 900
    (warning,) = queries.room_warnings(pool, now)
    assert "chat-ttft" in warning and "900 ms" in warning
