"""Pages of budgets and of tenants with their money."""

import csv
import io

import pytest
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.budgets.models import Budget
from controlplane.contracts.models import Contract, ContractVersion
from controlplane.core.reasons import Reason
from controlplane.tenants.models import Tenant
from controlplane.usage.models import RefusalMinute
from tests import factories
from tests.budgets.test_budget_actions import EUR, create, edit, window

FORM = {
    "tenant": "acme", "name": "Month", "limit": "22000.00", "hard": "hard", "period": "month", "anchor_day": "1",
    "zone": "Europe/Berlin", "thresholds": "50, 80, 100",
}  # fmt: skip


@pytest.fixture
def acme(people):
    return Tenant.objects.get(slug="acme")


def csv_rows(response) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(b"".join(response.streaming_content).decode())))


class TestForm:
    def test_the_review_shows_what_will_be_and_saves_nothing(self, people, acme):
        response = people["finance"].post("/budgets/new/", FORM)
        assert "22,000.00" in response.content.decode() and "Reason" in response.content.decode()
        assert not Budget.objects.exists()

    def test_confirming_needs_a_reason(self, people, acme):
        response = people["finance"].post("/budgets/new/", {**FORM, "confirm": "1"})
        assert response.status_code == 400 and not Budget.objects.exists()

    def test_confirming_with_a_reason_saves(self, people, acme):
        response = people["finance"].post("/budgets/new/", {**FORM, "confirm": "1", "reason": "Plan 2027"})
        budget = Budget.objects.get()
        assert response.url == f"/budgets/{budget.pk}/"
        assert (budget.limit_nanos, budget.zone, budget.thresholds_percent) == (
            22_000 * EUR,
            "Europe/Berlin",
            [50, 80, 100],
        )
        assert AuditEntry.objects.get(noun="budget").reason == "Plan 2027"

    def test_what_is_wrong_stands_in_the_summary_and_at_the_field_with_the_same_words(self, people, acme):
        page = people["finance"].post("/budgets/new/", {**FORM, "limit": "22,000"}).content.decode()
        assert page.count("is not a decimal number") == 2 and 'href="#id_limit"' in page and 'value="22,000"' in page

    def test_an_edit_shows_before_and_after_and_when_a_lower_limit_is_in_force(self, people, acme):
        budget = create(acme, now=timezone.now())
        window(budget, settled=40, leased=20, at=timezone.now())
        form = {**FORM, "limit": "50.00", "zone": "UTC", "version": "1"}
        page = people["finance"].post(f"/budgets/{budget.pk}/edit/", form).content.decode()
        assert "100.00" in page and "50.00" in page
        assert "40.00 is settled and 20.00 is leased" in page and "until then at most 100.00" in page
        people["finance"].post(f"/budgets/{budget.pk}/edit/", {**form, "confirm": "1", "reason": "cut"})
        page = people["finance"].get(f"/budgets/{budget.pk}/").content.decode()
        assert "60.00" in page and "is in force" in page

    def test_whoever_was_slower_sees_what_the_other_did_and_decides(self, people, acme):
        budget = create(acme)
        edit(budget, limit_nanos=70 * EUR)
        form = {**FORM, "limit": "50.00", "zone": "UTC", "version": "1", "confirm": "1", "reason": "cut"}
        response = people["finance"].post(f"/budgets/{budget.pk}/edit/", form)
        page = response.content.decode()
        assert response.status_code == 409 and "ada changed this" in page and "70.00" in page and "50.00" in page
        assert 'name="version" value="2"' in page
        assert Budget.objects.get().limit_nanos == 70 * EUR

    def test_oncall_reads_and_does_not_write(self, people, acme):
        budget = create(acme)
        assert people["oncall"].get(f"/budgets/{budget.pk}/").status_code == 200
        assert people["oncall"].post(f"/budgets/{budget.pk}/archive/", {"reason": "x"}).status_code == 403
        assert "budget-new" not in people["oncall"].get("/budgets/").content.decode()

    def test_a_strangers_budget_is_not_there(self, people, acme):
        budget = create(acme)
        assert people["tenant"].get(f"/budgets/{budget.pk}/").status_code == 200
        assert people["stranger"].get(f"/budgets/{budget.pk}/").status_code == 404
        assert "Month" not in people["stranger"].get("/budgets/").content.decode()


class TestTenantList:
    def test_what_needs_attention_comes_first(self, people, acme):
        now = timezone.now()
        for slug, settled in (("fine", 10), ("empty", 100), ("close", 85)):
            budget = create(factories.tenant(slug), now=now)
            window(budget, settled=settled, at=now)
        Tenant.objects.filter(slug="acme").update(state="suspended")
        page = people["admin"].get("/tenants/").content.decode()
        places = [page.index(f'href="/tenants/{slug}/"') for slug in ("empty", "close", "fine", "acme")]
        assert places == sorted(places)
        assert "Stopped" in page and "Near limit" in page and "Suspended" in page

    def test_a_hard_limit_lowered_under_what_is_spent_sorts_as_the_budgets_page_shows_it(self, people, acme):
        now = timezone.now()
        lowered = create(factories.tenant("lowered"), now=now)
        window(lowered, settled=90, leased=5, at=now)
        edit(lowered, now=now, limit_nanos=80 * EUR)
        window(create(factories.tenant("close"), now=now), settled=85, at=now)
        lowered.refresh_from_db()
        assert lowered.windows.get().limit_nanos == 95 * EUR, "leases that are out keep their money"
        page = people["admin"].get("/tenants/").content.decode()
        assert page.index('href="/tenants/lowered/"') < page.index('href="/tenants/close/"')
        assert "Stopped" in people["admin"].get(f"/budgets/?q={lowered.tenant.slug}").content.decode()

    def test_search_state_and_order(self, people, acme):
        factories.tenant("zulu", name="Last one", state="archived")
        client = people["admin"]
        assert 'href="/tenants/zulu/"' not in client.get("/tenants/").content.decode()
        assert 'href="/tenants/zulu/"' in client.get("/tenants/?state=archived").content.decode()
        found = client.get("/tenants/?q=Last&state=all").content.decode()
        assert 'href="/tenants/zulu/"' in found and 'href="/tenants/acme/"' not in found
        newest = client.get("/tenants/?sort=newest&state=all").content.decode()
        assert newest.index('href="/tenants/zulu/"') < newest.index('href="/tenants/acme/"')

    @pytest.mark.parametrize("sort", ["attention", "name", "newest"])
    def test_pages_hold_every_tenant_once(self, sort, people, acme):
        for number in range(60):
            factories.tenant(f"t{number:02}")
        seen, address = [], f"/tenants/?sort={sort}"
        while address:
            response = people["admin"].get(address)
            seen += [row.tenant.slug for row in response.context["rows"]]
            cursor = response.context["page"].next_cursor
            address = f"/tenants/?sort={sort}&cursor={cursor}" if cursor and response.context["rows"] else ""
        assert len(seen) == 62 and len(set(seen)) == 62

    def test_a_cursor_of_elsewhere_is_a_400(self, people):
        assert people["admin"].get("/tenants/?cursor=nonsense").status_code == 400

    def test_the_number_of_queries_does_not_grow_with_the_rows(self, people, acme, django_assert_num_queries):
        def child(number: int) -> None:
            row = factories.tenant(f"t{number:02}", parent=acme)
            window(create(row, now=timezone.now()), settled=number, at=timezone.now())

        child(0)
        with django_assert_num_queries(QUERIES_OF_TENANTS):
            people["admin"].get("/tenants/")
        for number in range(1, 21):
            child(number)
        with django_assert_num_queries(QUERIES_OF_TENANTS):
            people["admin"].get("/tenants/")

    def test_text_that_a_spreadsheet_would_run_is_inert_in_the_csv(self, people, acme):
        Tenant.objects.filter(slug="acme").update(name='=HYPERLINK("http://x")')
        window(create(acme, now=timezone.now()), settled=40, leased=2, at=timezone.now())
        rows = {row["tenant"]: row for row in csv_rows(people["admin"].get("/tenants/?format=csv"))}
        assert rows["acme"]["name"] == '\'=HYPERLINK("http://x")'
        assert (rows["acme"]["settled"], rows["acme"]["leased"], rows["acme"]["limit"]) == ("40", "2", "100")

    def test_an_installation_without_tenants_says_what_to_do(self, people):
        Tenant.objects.filter(slug="stranger").update(state="archived")
        Tenant.objects.filter(slug="acme").update(state="archived")
        page = people["admin"].get("/tenants/").content.decode()
        assert "No tenant matches" in page


class TestTenantPage:
    def test_refusals_are_counted_by_reason(self, people, acme):
        for reason, count in ((Reason.RATE_LIMIT, 3), (Reason.QUEUE_FULL, 1_250)):
            RefusalMinute.objects.create(
                minute=timezone.now(), pool_id=1, tenant_id=acme.pk, class_id=1, reason=reason.code, count=count
            )
        page = people["tenant"].get("/tenants/acme/").content.decode()
        assert page.index("queue_full") < page.index("rate_limit") and "1,250" in page

    def test_contracts_of_the_tenant_and_of_its_classes(self, people, acme):
        chat = factories.workload_class("chat")
        for slug, owner in (("own", acme), ("everybody", None), ("theirs", Tenant.objects.get(slug="stranger"))):
            contract = Contract.objects.create(
                slug=slug, name=slug, workload_class=chat, tenant=owner, created_at=factories.NOW
            )
            ContractVersion.objects.create(
                contract=contract, number=1, effective_from=factories.NOW, target_ppm=990_000, threshold_ms=200,
                created_by="ada", created_at=factories.NOW,
            )  # fmt: skip
        page = people["tenant"].get("/tenants/acme/?tab=contracts").content.decode()
        assert page.index(">own<") < page.index(">everybody<") and "theirs" not in page

    def test_a_parents_money_is_not_shown_to_the_childs_member(self, people, acme):
        parent = factories.tenant("holding")
        create(parent, name="holding-budget")
        Tenant.objects.filter(slug="acme").update(parent=parent)
        assert "holding-budget" in people["admin"].get("/tenants/acme/?tab=budgets").content.decode()
        page = people["tenant"].get("/tenants/acme/?tab=budgets").content.decode()
        assert "holding-budget" not in page and 'href="/tenants/holding/"' not in page

    @pytest.mark.parametrize("tab", ["overview", "keys", "budgets", "contracts", "members", "audit"])
    def test_every_tab_is_there_empty(self, tab, people, acme):
        assert people["admin"].get(f"/tenants/acme/?tab={tab}").status_code == 200


def test_the_budget_lists_queries_do_not_grow(people, acme, django_assert_num_queries):
    create(acme)
    with django_assert_num_queries(QUERIES_OF_BUDGETS):
        people["finance"].get("/budgets/")
    for number in range(20):
        create(factories.tenant(f"t{number:02}"))
    with django_assert_num_queries(QUERIES_OF_BUDGETS):
        people["finance"].get("/budgets/")


QUERIES_OF_TENANTS = 16
QUERIES_OF_BUDGETS = 10
