"""Forecasts from day rollups, on the budgets' pages, in the tenant's own view and over REST; and increases there."""

import csv
import io
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.budgets.forecasts import spend_days
from controlplane.budgets.increases import add_increase
from controlplane.budgets.models import BudgetIncrease
from controlplane.budgets.queries import standings
from controlplane.core.spend_forecast import DaySpend
from controlplane.tenants.models import Installation, Tenant
from controlplane.usage.models import RollupDay
from tests import factories
from tests.budgets.test_budget_actions import ADA, EUR, create, window
from tests.tenants.test_api import send


def day_of(tenant, day, nanos, *, outcome=1):
    RollupDay.objects.create(
        day=day, pool_id=1, tenant_id=tenant.pk, class_id=1, model_id=1, rate_version=1, outcome=outcome, requests=1,
        prompt_tokens=1, cached_tokens=0, output_tokens=1, gpu_us=1, charge_prompt_nanos=nanos, charge_cached_nanos=0,
        charge_output_nanos=0, charge_gpu_nanos=0, stages=b"",
    )  # fmt: skip


def days_of(tenant, now, spends):
    """One day a number, the last of them yesterday."""
    for back, nanos in enumerate(reversed(spends), start=1):
        if nanos is not None:
            day_of(tenant, (now - timedelta(days=back)).date(), nanos)


@pytest.fixture
def acme(people):
    return Tenant.objects.get(slug="acme")


class TestDays:
    NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)

    def test_a_childs_charges_are_its_parents_too_and_today_is_not_over(self, acme):
        child = factories.tenant("team", parent=acme)
        days_of(acme, self.NOW, [5, 7])
        day_of(child, self.NOW.date() - timedelta(days=1), 3)
        day_of(child, self.NOW.date(), 100)
        assert spend_days([acme.pk, child.pk], self.NOW) == {
            acme.pk: [DaySpend(2, 5), DaySpend(3, 10)],
            child.pk: [DaySpend(3, 3)],
        }

    def test_a_day_without_charges_is_nothing_spent_only_if_anybody_was_served(self, acme):
        days_of(acme, self.NOW, [4, None, None, 6])
        day_of(Tenant.objects.get(slug="stranger"), self.NOW.date() - timedelta(days=2), 50)
        assert [day.nanos for day in spend_days([acme.pk], self.NOW)[acme.pk]] == [4, 0, 6]

    def test_days_are_those_of_the_billing_zone(self, acme):
        Installation.objects.update(billing_zone="Pacific/Auckland")
        day_of(acme, self.NOW.date(), 9)
        assert [day.nanos for day in spend_days([acme.pk], self.NOW)[acme.pk]] == [9], "it is the 21st there"


class TestOutlook:
    NOW = datetime(2026, 11, 20, tzinfo=UTC)

    def test_six_days_are_unknown_and_seven_a_forecast(self, acme):
        budget = create(acme, limit_nanos=100 * EUR)
        days_of(acme, self.NOW, [2 * EUR] * 6)
        found = standings([budget], self.NOW)[0]
        assert found.forecast_nanos is None and (found.outlook.days, found.outlook.days_missing) == (6, 1)
        day_of(acme, self.NOW.date() - timedelta(days=7), 2 * EUR)
        window(budget, settled=90, at=self.NOW)
        found = standings([budget], self.NOW)[0]
        assert found.forecast_nanos == 112 * EUR and found.outlook.reached_at == datetime(2026, 11, 25, tzinfo=UTC)
        assert found.state == "near"

    def test_an_increase_moves_the_instant(self, acme):
        budget = create(acme, limit_nanos=100 * EUR)
        days_of(acme, self.NOW, [10 * EUR] * 7)
        window(budget, settled=20, at=self.NOW)
        assert standings([budget], self.NOW)[0].state == "forecast"
        add_increase(
            budget_id=budget.pk, amount_nanos=100 * EUR, ends_at=self.NOW + timedelta(days=20), reason="launch",
            actor=ADA, now=self.NOW,
        )  # fmt: skip
        found = standings([budget], self.NOW)[0]
        assert found.state == "ok" and found.outlook.reached_at is None


class TestPages:
    def test_the_list_says_unknown_until_there_is_a_week(self, people, acme):
        now = timezone.now()
        create(acme, period="week", limit_nanos=10**6 * EUR, now=now)
        for address in ("/budgets/", "/tenants/acme/?tab=budgets"):
            assert "unknown: 0 of 7 days" in people["tenant"].get(address).content.decode()
        days_of(acme, now, [EUR] * 8)
        for address in ("/budgets/", "/tenants/acme/?tab=budgets"):
            page = people["tenant"].get(address).content.decode()
            assert "unknown" not in page and "lasts" in page

    def test_the_budgets_page_names_the_interval_and_when_the_limit_is_reached(self, people, acme):
        now = timezone.now()
        budget = create(acme, limit_nanos=EUR // 1000, period="week", now=now)
        assert "Unknown: 0 of 7 days" in people["finance"].get(f"/budgets/{budget.pk}/").content.decode()
        days_of(acme, now, [EUR, 2 * EUR] * 4)
        page = people["tenant"].get(f"/budgets/{budget.pk}/").content.decode()
        assert "At least" in page and "At most" in page and "Limit reached" in page

    def test_the_csv_has_the_interval(self, people, acme):
        now = timezone.now()
        create(acme, limit_nanos=10**6 * EUR, now=now)
        days_of(acme, now, [EUR] * 8)
        text = b"".join(people["finance"].get("/budgets/?format=csv").streaming_content).decode()
        (row,) = csv.DictReader(io.StringIO(text))
        assert float(row["forecast_low"]) <= float(row["forecast"]) <= float(row["forecast_high"])
        assert row["reached_at"] == "" and row["increase"] == "0"


class TestIncreasePages:
    GIVEN = {"amount": "40.00", "starts_at": "", "reason": "launch week"}

    def until(self, hours):
        return f"{timezone.now() + timedelta(hours=hours):%Y-%m-%dT%H:%M}"

    def test_finance_raises_and_ends_with_a_token_and_a_reason(self, people, acme):
        budget, client = create(acme, now=timezone.now()), people["finance"]
        client.handler.enforce_csrf_checks = True
        address = f"/budgets/{budget.pk}/increase/"
        assert client.post(address, {**self.GIVEN, "ends_at": self.until(3)}).status_code == 403
        page = client.get(f"/budgets/{budget.pk}/").content.decode()
        token = page.split('name="csrfmiddlewaretoken" value="')[1].split('"')[0]
        given = {**self.GIVEN, "ends_at": self.until(3), "csrfmiddlewaretoken": token}
        assert client.post(address, given).status_code == 302
        row = BudgetIncrease.objects.get()
        assert (row.amount_nanos, row.made_by, row.reason) == (40 * EUR, "finance", "launch week")
        page = client.get(f"/budgets/{budget.pk}/").content.decode()
        assert "Raised by 40.00 to 140.00" in page and "launch week" in page
        end = f"/budgets/{budget.pk}/increases/{row.pk}/end/"
        client.post(end, {"reason": "", "csrfmiddlewaretoken": token})
        assert BudgetIncrease.objects.get().ended_at is None
        assert client.post(end, {"reason": "over", "csrfmiddlewaretoken": token}).status_code == 302
        page = client.get(f"/budgets/{budget.pk}/").content.decode()
        assert "Ended early" in page and "Raised by" not in page
        assert set(AuditEntry.objects.filter(noun="budget").values_list("action", flat=True)) == {
            "budget.create", "budget.increase", "budget.increase_end",
        }  # fmt: skip

    def test_what_is_wrong_comes_back_with_what_was_given(self, people, acme):
        budget = create(acme, now=timezone.now())
        response = people["finance"].post(
            f"/budgets/{budget.pk}/increase/", {**self.GIVEN, "amount": "1,0", "ends_at": self.until(-3)}
        )
        page = response.content.decode()
        assert response.status_code == 400 and 'value="1,0"' in page and "There is a problem" in page
        response = people["finance"].post(f"/budgets/{budget.pk}/increase/", {**self.GIVEN, "ends_at": self.until(-3)})
        assert "It ends after it begins" in response.content.decode() and not BudgetIncrease.objects.exists()

    def test_instants_are_read_by_the_clocks_of_the_budgets_zone(self, people, acme):
        budget = create(acme, now=timezone.now(), zone="Asia/Kolkata")
        given = {**self.GIVEN, "starts_at": "2030-01-01T00:00", "ends_at": "2030-02-01T00:00"}
        people["finance"].post(f"/budgets/{budget.pk}/increase/", given)
        row = BudgetIncrease.objects.get()
        assert row.starts_at == datetime(2029, 12, 31, 18, 30, tzinfo=UTC)

    def test_a_tenant_sees_the_increase_and_neither_who_nor_why(self, people, acme):
        budget = create(acme, now=timezone.now())
        people["finance"].post(f"/budgets/{budget.pk}/increase/", {**self.GIVEN, "ends_at": self.until(3)})
        page = people["tenant"].get(f"/budgets/{budget.pk}/").content.decode()
        assert "Raised by 40.00" in page and "launch week" not in page
        (row,) = people["tenant"].get(f"/api/v1/budgets/{budget.pk}/increases/").json()
        assert row["amount"] == "40.00" and "reason" not in row and "made_by" not in row
        assert people["stranger"].get(f"/api/v1/budgets/{budget.pk}/increases/").status_code == 404

    def test_another_budgets_increase_is_not_there(self, people, acme):
        mine, other = create(acme, now=timezone.now()), create(acme, name="other", now=timezone.now())
        people["finance"].post(f"/budgets/{mine.pk}/increase/", {**self.GIVEN, "ends_at": self.until(3)})
        address = f"/budgets/{other.pk}/increases/{BudgetIncrease.objects.get().pk}/end/"
        assert people["finance"].post(address, {"reason": "x"}).status_code == 404


class TestRest:
    def test_outlook_and_increases(self, people, acme):
        now = timezone.now()
        budget = create(acme, now=now)
        url = f"/api/v1/budgets/{budget.pk}/"
        present = people["finance"].get(url).json()["present"]
        assert present["forecast"] is None and present["outlook"] == {
            "days": 0, "low": None, "point": None, "high": None, "reached_at": None, "earliest_at": None,
            "latest_at": None,
        }  # fmt: skip
        days_of(acme, now, [EUR] * 8)
        outlook = people["tenant"].get(url).json()["present"]["outlook"]
        assert outlook["days"] == 8 and outlook["low"] == outlook["point"] == outlook["high"] != "0"
        body = {"amount": "40.00", "ends_at": f"{now + timedelta(hours=2):%Y-%m-%dT%H:%M:%SZ}", "reason": "launch"}
        key = {"Idempotency-Key": "once"}
        for _ in range(2):
            made = send(people["finance"], "post", f"{url}increases/", body, **key)
            assert made.status_code == 201 and made.json()["state"] == "in force"
        assert BudgetIncrease.objects.count() == 1
        present = people["finance"].get(url).json()["present"]
        assert (present["increase"], present["limit_in_force"]) == ("40.00", "140.00")
        assert send(people["finance"], "post", f"{url}increases/", {**body, "amount": 40}).status_code == 400
        assert send(people["oncall"], "post", f"{url}increases/", body).status_code == 403
        end = {"increase": made.json()["id"], "reason": "over"}
        assert send(people["finance"], "post", f"{url}end-increase/", end).json()["state"] == "ended early"
        assert send(people["finance"], "post", f"{url}end-increase/", {**end, "increase": 10**6}).status_code == 404
        assert people["finance"].get(f"{url}notices/").json() == []
