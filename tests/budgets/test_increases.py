"""Increases for a time: they hold from the instant to the instant, end by themselves, and let no limit be passed."""

from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ValidationError

from controlplane.alerts.models import Delivery
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.budgets import actions
from controlplane.budgets.increase_queries import state_of
from controlplane.budgets.increases import AT_ONCE_MAX, add_increase, end_increase
from controlplane.budgets.ingest import settle_soft
from controlplane.budgets.lease_settling import SpendReport, settle
from controlplane.budgets.leases import LEASE_LIFE, Asking, acquire
from controlplane.budgets.models import BudgetIncrease, BudgetNotice, BudgetWindow
from controlplane.budgets.queries import standings
from controlplane.budgets.sweep import sweep
from controlplane.core.period import from_us, to_us
from controlplane.wire.report import LeaseSpend
from tests.alerts.test_observing import receiver
from tests.threads import at_once

ADA = Actor(id=None, name="ada", role="finance")
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


def more(budget, amount, now, *, hours=1.0, **values):
    return add_increase(
        budget_id=budget.pk, amount_nanos=amount, ends_at=now + hours * HOUR, reason="launch", actor=ADA, now=now,
        **values,
    )  # fmt: skip


def used(budget):
    window = BudgetWindow.objects.get(budget=budget)
    return window.settled_nanos + window.leased_nanos


class TestLimit:
    def test_it_holds_from_the_instant_to_the_instant(self, budget, in_transaction, noon):
        own = budget(limit=100)
        asking = Asking(1, 1, budget.child.pk, 100)
        assert in_transaction(acquire, asking, noon).lease.amount_nanos == 100
        assert in_transaction(acquire, asking, noon).lease is None
        more(own, 100, noon, starts_at=noon + HOUR, hours=2)
        assert in_transaction(acquire, asking, noon + HOUR - MINUTE).lease is None
        assert in_transaction(acquire, asking, noon + HOUR).lease.amount_nanos == 100
        assert in_transaction(acquire, asking, noon + HOUR).exhausted is not None
        more(own, 100, noon + HOUR, hours=1)
        assert in_transaction(acquire, asking, noon + 2 * HOUR).lease is None, "it was over at that instant"
        assert used(own) == 200

    def test_what_it_allowed_ends_with_it_and_the_limit_comes_back_as_leases_do(self, budget, in_transaction, noon):
        own = budget(limit=100)
        more(own, 100, noon, hours=0.1)
        lease = in_transaction(acquire, Asking(1, 1, budget.child.pk, 160), noon).lease
        assert from_us(lease.expires_us) == noon + 6 * MINUTE < noon + LEASE_LIFE
        after = noon + 7 * MINUTE
        sweep(after)
        window = BudgetWindow.objects.get(budget=own)
        assert (window.limit_nanos, window.leased_nanos) == (160, 160), "what is out stays counted"
        in_transaction(settle, [SpendReport(1, to_us(after), [LeaseSpend(lease.lease_id, 30, 0)])], after)
        sweep(after)
        window.refresh_from_db()
        assert (window.limit_nanos, window.settled_nanos, window.leased_nanos) == (100, 30, 0)
        assert in_transaction(acquire, Asking(1, 1, budget.child.pk, 71), after).lease is None
        assert in_transaction(acquire, Asking(1, 1, budget.child.pk, 70), after).lease is not None

    def test_it_raises_its_own_level_only(self, budget, in_transaction, noon):
        own, group = budget(limit=100), budget(limit=150, tenant=budget.parent, name="group")
        more(own, 900, noon)
        assert in_transaction(acquire, Asking(1, 1, budget.child.pk, 150), noon).lease is not None
        blocked = in_transaction(acquire, Asking(1, 1, budget.child.pk, 1), noon).exhausted
        assert blocked.budget.startswith("group: group") and used(group) == 150

    def test_ended_early_is_over_at_once(self, budget, in_transaction, noon):
        own = budget(limit=100)
        row = more(own, 100, noon)
        end_increase(increase_id=row.pk, reason="enough", actor=ADA, now=noon + MINUTE)
        again = end_increase(increase_id=row.pk, reason="enough", actor=ADA, now=noon + 2 * MINUTE)
        assert again.ended_at == noon + MINUTE and state_of(again, noon + MINUTE) == "ended early"
        assert BudgetWindow.objects.get(budget=own).limit_nanos == 100
        assert in_transaction(acquire, Asking(1, 1, budget.child.pk, 101), noon + MINUTE).lease is None
        assert AuditEntry.objects.filter(action="budget.increase_end").count() == 1

    def test_a_planned_one_can_be_called_off(self, budget, in_transaction, noon):
        own = budget(limit=100)
        row = more(own, 100, noon, starts_at=noon + HOUR, hours=2)
        assert state_of(row, noon) == "planned" and state_of(row, noon + HOUR) == "in force"
        end_increase(increase_id=row.pk, reason="no launch", actor=ADA, now=noon)
        assert in_transaction(acquire, Asking(1, 1, budget.child.pk, 101), noon + HOUR).lease is None

    def test_a_changed_limit_keeps_the_increase(self, budget, noon):
        own = budget(limit=100)
        more(own, 50, noon)
        actions.edit_budget(
            budget_id=own.pk, version=1, changes={"limit_nanos": 200}, reason="plan", actor=ADA, now=noon
        )
        assert BudgetWindow.objects.get(budget=own).limit_nanos == 250
        standing = standings([own.__class__.objects.get(pk=own.pk)], noon)[0]
        assert (standing.limit_nanos, standing.increase_nanos, standing.raised_until) == (250, 50, noon + HOUR)
        assert standings([own], noon + HOUR)[0].increase_nanos == 0


class TestWriting:
    def test_maker_reason_and_amount_are_in_the_audit(self, budget, noon):
        row = more(budget(limit=100), 50 * 10**9, noon)
        entry = AuditEntry.objects.get(action="budget.increase")
        assert (entry.actor_name, entry.reason, entry.after["amount"], entry.after["increase"]) == (
            "ada", "launch", "50.00", row.pk,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "amount,values,field",
        [
            (0, {}, "amount"),
            (-5, {}, "amount"),
            (2**63, {}, "amount"),
            (2**63 - 50, {}, "amount"),
            (5, {"hours": 0}, "ends_at"),
            (5, {"hours": -1}, "ends_at"),
            (5, {"hours": 24 * 367}, "ends_at"),
        ],
    )
    def test_refuses_what_cannot_work(self, amount, values, field, budget, noon):
        with pytest.raises(ValidationError) as caught:
            more(budget(limit=100), amount, noon, **values)
        assert list(caught.value.message_dict) == [field] and not BudgetIncrease.objects.exists()

    def test_the_past_is_not_raised_and_a_reason_is_needed(self, budget, noon):
        own = budget(limit=100)
        with pytest.raises(ValidationError, match="has not passed"):
            more(own, 5, noon, starts_at=noon - MINUTE)
        with pytest.raises(ValidationError):
            add_increase(budget_id=own.pk, amount_nanos=1, ends_at=noon + HOUR, reason=" ", actor=ADA, now=noon)

    def test_an_archived_budget_and_too_many_at_a_time_are_refused(self, budget, noon):
        own = budget(limit=100)
        for _ in range(AT_ONCE_MAX):
            more(own, 1, noon)
        with pytest.raises(ValidationError, match="at most 20"):
            more(own, 1, noon)
        more(own, 1, noon + 2 * HOUR)
        archived = budget(limit=1, name="old", archived_at=noon)
        with pytest.raises(ValidationError, match="archived"):
            more(archived, 1, noon)

    def test_several_at_once_are_all_there_and_stay_under_what_a_number_can_hold(self, budget, noon):
        own = budget(limit=100)
        at_once([lambda: more(own, 2**61, noon)] * 3)
        assert BudgetWindow.objects.get(budget=own).limit_nanos == 100 + 3 * 2**61
        with pytest.raises(ValidationError, match="together"):
            more(own, 2**62, noon)


class TestThresholds:
    def test_one_notice_a_crossing_and_armed_again_above_it(self, budget, in_transaction, noon):
        own = budget(limit=100, hard=False)
        spend = lambda nanos: in_transaction(settle_soft, [(budget.child.pk, to_us(noon), nanos)])  # noqa: E731
        spend(85)
        assert [sweep(noon).thresholds for _ in range(3)] == [2, 0, 0]
        row = more(own, 900, noon)
        assert sweep(noon).thresholds == 0 and BudgetWindow.objects.get(budget=own).notified_percent == 0
        end_increase(increase_id=row.pk, reason="over", actor=ADA, now=noon + MINUTE)
        assert sweep(noon + MINUTE).thresholds == 2, "crossed again"
        spend(20)
        assert sweep(noon + MINUTE).thresholds == 1
        assert list(BudgetNotice.objects.order_by("id").values_list("percent", "settled_nanos", "limit_nanos")) == [
            (50, 85, 100), (80, 85, 100), (50, 85, 100), (80, 85, 100), (100, 105, 100),
        ]  # fmt: skip

    def test_sweeps_at_once_write_each_notice_once(self, budget, in_transaction, noon):
        budget(limit=100, hard=False)
        sweep(noon)
        in_transaction(settle_soft, [(budget.child.pk, to_us(noon), 60)])
        found = at_once([lambda: sweep(noon).thresholds] * 4)
        assert sorted(found) == [0, 0, 0, 1] and BudgetNotice.objects.count() == 1

    def test_a_crossing_is_told_to_receivers_once_and_a_hard_one_that_is_used_up_is_a_page(
        self, budget, in_transaction, noon
    ):
        for name, severity in (("mail", "ticket"), ("pager", "page")):
            receiver(noon, name=name, severity=severity)
        budget(limit=100, hard=False)
        in_transaction(settle_soft, [(budget.child.pk, to_us(noon), 85)])
        for _ in range(2):
            sweep(noon)
        message = Delivery.objects.get()
        assert message.receiver.name == "mail"
        assert message.subject == "Budget plan of acme is 80 % used"
        assert (message.body["data"]["percent"], message.body["data"]["settled_nanos"]) == (80, 85)
        hard = budget(limit=100, name="hard", hard=True)
        sweep(noon)
        BudgetWindow.objects.filter(budget=hard).update(settled_nanos=100)
        sweep(noon)
        told = Delivery.objects.filter(subject="Budget hard of acme is 100 % used")
        assert sorted(row.receiver.name for row in told) == ["mail", "pager"]
        assert "new requests of the tenant are refused" in told[0].body["data"]["text"]

    def test_an_empty_budget_has_passed_nothing(self, budget, noon):
        budget(limit=0)
        assert sweep(noon).thresholds == 0

    def test_a_new_window_starts_armed(self, budget, in_transaction, noon):
        budget(limit=100, hard=False)
        in_transaction(settle_soft, [(budget.child.pk, to_us(noon), 60)])
        assert sweep(noon).thresholds == 1
        day = timedelta(days=1)
        in_transaction(settle_soft, [(budget.child.pk, to_us(noon + day), 60)])
        assert sweep(noon + day).thresholds == 1
        assert BudgetNotice.objects.values("window").distinct().count() == 2


def test_an_increase_over_a_clock_change_ends_at_its_instant(budget, in_transaction):
    budget(limit=100, zone="Europe/Berlin")
    before = datetime(2026, 10, 24, 21, 30, tzinfo=UTC)
    row = more(budget(limit=50, name="night", zone="Europe/Berlin"), 50, before, hours=26)
    asking = Asking(1, 1, budget.child.pk, 100)
    assert in_transaction(acquire, asking, before).lease is not None
    night = datetime(2026, 10, 25, 22, 45, tzinfo=UTC)
    assert night < row.ends_at and in_transaction(acquire, asking, night).lease is not None, "the day has 25 hours"
    assert in_transaction(acquire, asking, row.ends_at + MINUTE).lease is None
