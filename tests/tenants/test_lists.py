"""Every list of what an administrator sets up is searched, ordered, paged without loss, and exported."""

import csv
import io
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.access.models import Invitation
from controlplane.budgets.models import Budget
from controlplane.contracts.models import Contract, ContractVersion
from controlplane.ledger import rates
from controlplane.tenants import queries
from controlplane.tenants.models import ApiKey, Member, Tenant
from tests import factories
from tests.tenants.conftest import ADMIN

MANY = 60
"""More than a page."""
pytestmark = pytest.mark.django_db


@pytest.fixture
def world(people):
    now = timezone.now()
    chat, bulk = factories.workload_class("chat"), factories.workload_class("bulk", "batch")
    tenants = [factories.tenant(f"t{n:02}") for n in range(MANY)]
    users = User.objects.bulk_create(User(username=f"u{n:02}", email=f"u{n}@example.com") for n in range(MANY))
    Member.objects.bulk_create(Member(user=user, role="viewer") for user in users)
    ApiKey.objects.bulk_create(
        ApiKey(
            public_id=f"key_{n}", tenant=tenants[n], name=f"k{n}", prefix=f"p{n}", secret_hash=f"{n}", classes=["chat"],
            default_class="chat", created_at=now, expires_at=now + timedelta(days=n) if n % 2 else None,
            last_used_at=now - timedelta(days=n) if n % 3 else None,
        )
        for n in range(MANY)
    )  # fmt: skip
    Budget.objects.bulk_create(
        Budget(tenant=tenants[n], name=f"b{n}", limit_nanos=n % 7, created_at=now, updated_at=now) for n in range(MANY)
    )
    contracts = Contract.objects.bulk_create(
        Contract(slug=f"c{n:02}", name=f"C {n}", workload_class=bulk if n % 2 else chat, created_at=now)
        for n in range(MANY)
    )
    ContractVersion.objects.bulk_create(
        ContractVersion(
            contract=row, number=1, effective_from=now, target_ppm=990_000, created_by="ada", created_at=now
        )
        for row in contracts
    )
    Invitation.objects.bulk_create(
        Invitation(
            email=f"i{n:02}@example.com", role="viewer", secret_hash=f"{n}", created_at=now, created_by="ada",
            expires_at=now + timedelta(days=1), withdrawn_at=now if n == 7 else None,
        )
        for n in range(MANY)
    )  # fmt: skip
    return people["admin"]


LISTS = {
    "/tenants/": (("attention", "name", "newest"), MANY + 2, "t07"),
    "/keys/": (("newest", "tenant", "expiry", "unused"), MANY, "k17"),
    "/settings/members/": (("name", "role", "newest"), MANY + 6, "u7@example"),
    "/settings/invitations/": (("",), MANY - 1, "i08"),
    "/budgets/": (("tenant", "limit", "newest"), MANY, "b17"),
    "/contracts/": (("name", "class", "newest"), MANY, "C 17"),
}


@pytest.mark.parametrize("address", LISTS)
def test_pages_in_every_order_hold_every_row_once_and_both_ways(address, world):
    sorts, count, _ = LISTS[address]
    for sort in sorts:
        seen, cursor = [], ""
        while True:
            page = world.get(address, {"sort": sort, "cursor": cursor}).context["page"]
            seen += [row.pk for row in page.rows]
            back = page.previous_cursor
            if page.next_cursor is None or not page.rows:
                break
            cursor = page.next_cursor
        assert len(seen) == len(set(seen)) == count, (address, sort)
        before = world.get(address, {"sort": sort, "cursor": back}).context["page"].rows
        assert [row.pk for row in before] == seen[:50], (address, sort)


@pytest.mark.parametrize("address", LISTS)
def test_a_search_narrows_the_page_and_its_export(address, world):
    _, count, text = LISTS[address]
    assert len(world.get(address, {"q": text}).context["page"].rows) == 1
    assert world.get(address, {"q": "nothing like it"}).context["page"].rows == []
    assert len(rows_of(world.get(address, {"format": "csv"}))) == count
    assert len(rows_of(world.get(address, {"format": "csv", "q": text}))) == 1


@pytest.mark.parametrize("address", LISTS)
def test_a_cursor_of_elsewhere_is_told(address, world):
    assert world.get(address, {"cursor": "nonsense"}).status_code == 400


def rows_of(response):
    assert response.headers["Content-Type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(b"".join(response.streaming_content).decode())))


def test_keys_that_end_first_and_those_that_nobody_uses(world):
    first = world.get("/keys/?sort=expiry").context["page"].rows
    assert [key.name for key in first[:3]] == ["k1", "k3", "k5"]
    unused = world.get("/keys/?sort=unused").context["page"].rows
    assert unused[0].last_used_at is None and unused[20].name == "k59"


def test_invitations_that_are_over_are_there_when_asked_for(world):
    assert "i07@example.com" not in world.get("/settings/invitations/?q=i07").content.decode()
    page = world.get("/settings/invitations/?q=i07&state=all").content.decode()
    assert "i07@example.com" in page and "Withdrawn" in page and "/withdraw/" not in page


def test_the_list_of_invitations_asks_the_same_for_one_as_for_many(world, django_assert_num_queries):
    with django_assert_num_queries(6):
        world.get("/settings/invitations/?q=i08")
    with django_assert_num_queries(6):
        world.get("/settings/invitations/")


def test_classes_are_searched_ordered_and_exported(people):
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch", min_share_ppm=125_000)
    client = people["viewer"]
    assert [row.slug for row, *_ in client.get("/classes/?sort=name").context["rows"]] == ["bulk", "chat"]
    assert [row.slug for row, *_ in client.get("/classes/?q=ul").context["rows"]] == ["bulk"]
    found = {row["class"]: row for row in rows_of(client.get("/classes/?format=csv"))}
    assert found["bulk"]["min_share_percent"] == "12.5000" and found["chat"]["tenants"] == "1"


def test_suggestions_of_a_field_that_asks_for_a_tenant(people):
    factories.tenant("acme-archived", state="archived")
    admin = people["admin"].get("/tenant-names/?parent=acm").content.decode()
    assert admin == '<option value="acme">Acme</option>'
    assert people["tenant"].get("/tenant-names/?x=stran").content == b""
    page = people["admin"].get("/budgets/new/").content.decode()
    assert 'list="id_tenant-tenants"' in page and '<option value="acme">' in page


@pytest.mark.parametrize("given,said", [("acme", ""), ("nobody", "is no tenant to choose"), ("gone", "is no tenant")])
def test_a_tenant_is_named_by_its_short_name(given, said, people):
    factories.tenant("gone", state="archived")
    form = {
        "tenant": given, "name": "M", "limit": "5", "hard": "hard", "period": "month", "anchor_day": "1", "zone": "UTC",
        "thresholds": "80",
    }  # fmt: skip
    response = people["admin"].post("/budgets/new/", form)
    assert response.status_code == (400 if said else 200) and said in response.content.decode()


def test_nobody_is_its_own_parent(people):
    form = {"name": "A", "parent": "acme", "weight": "1", "max_concurrency": "1", "outage_posture": "closed"}
    response = people["admin"].post("/tenants/acme/edit/", {**form, "version": "1"})
    assert response.status_code == 400 and "acme is no tenant to choose" in response.content.decode()


def test_pools_are_searched_archived_ones_too_and_exported(people):
    factories.slot(factories.pool("small", model="llama-8b", gpu_type="L40S"), "i1", "interactive")
    factories.pool("gone", archived_at=timezone.now())
    client = people["viewer"]

    def slugs(query):
        return [row.pool.slug for row in client.get(f"/pools/?{query}").context["rows"]]

    assert slugs("") == slugs("q=8b") == slugs("q=chat") == ["small"] and slugs("q=gone") == []
    page = client.get("/pools/?state=archived").content.decode()
    assert slugs("state=archived") == ["gone"] and "Archived" in page and "/pools/gone/" not in page
    (row,) = rows_of(client.get("/pools/?format=csv"))
    assert (row["pool"], row["interactive_slots"], row["agents"]) == ("small", "1", "0")


def test_every_version_of_rates_is_in_their_exports(people):
    pool = factories.pool("small", model="llama-8b")
    now = timezone.now()
    for price in (1_500_000_000, 2_000_000_000):
        rates.add_cost_rate(
            pool_slug="small", nanos_per_slot_hour=price, actor=ADMIN, now=now, reason="r",
            effective_from=now + timedelta(days=price // 1_000_000_000),
        )  # fmt: skip
    factories.workload_class("chat")
    prices = {"prompt_nanos_per_mtok": 400_000_000, "output_nanos_per_mtok": 1, "discount_ppm": 125_000}
    rates.add_rate_card(class_slug="chat", model=pool.model.name, values=prices, actor=ADMIN, now=now, reason="r")
    costs = rows_of(people["viewer"].get("/rates/?format=cost.csv"))
    assert [row["cost_per_slot_hour"] for row in costs] == ["2", "1.5"]
    (card,) = rows_of(people["viewer"].get("/rates/?format=cards.csv"))
    assert (card["class"], card["prompt_per_mtok"], card["discount_percent"]) == ("chat", "0.4", "12.5000")


REST = {
    "/api/v1/tenants/": (("slug", "created_at", "weight"), MANY + 2),
    "/api/v1/api-keys/": (("created_at", "name", "last_used_at"), MANY),
    "/api/v1/members/": (("id", "role"), MANY + 6),
    "/api/v1/invitations/": (("id", "expires_at"), MANY - 1),
    "/api/v1/budgets/": (("id", "name", "limit_nanos", "created_at"), MANY),
    "/api/v1/contracts/": (("slug", "created_at"), MANY),
}


@pytest.mark.parametrize("address", REST)
def test_rest_lists_in_every_order_hold_every_row_once_and_both_ways(address, world):
    orders, count = REST[address]
    for order in [*orders, *(f"-{name}" for name in orders)]:
        pages, url = [], f"{address}?ordering={order}&limit=17"
        while url:
            body = world.get(url).json()
            pages.append([row.get("id", row.get("slug")) for row in body["results"]])
            url, back = body["next"], body["previous"]
        seen = [key for page in pages for key in page]
        assert len(seen) == len(set(seen)) == count, (address, order)
        assert [len(page) for page in pages[:-1]] == [17] * (len(pages) - 1)
        before = world.get(back).json()
        assert [row.get("id", row.get("slug")) for row in before["results"]] == pages[-2]
        assert before["next"] and before["previous"]


def test_a_rest_list_of_thousands_that_are_equal_in_its_order_has_an_end(people):
    row = {"name": "n", "classes": [], "created_at": factories.NOW, "updated_at": factories.NOW}
    Tenant.objects.bulk_create(Tenant(slug=f"same-{number}", **row) for number in range(2_100))
    seen, url = set(), "/api/v1/tenants/?ordering=weight&limit=500"
    for _ in range(5):
        body = people["admin"].get(url).json()
        seen |= {row["slug"] for row in body["results"]}
        url = body["next"]
    assert url is None and len(seen) == 2_102


def test_a_cursor_of_elsewhere_is_a_404_in_rest(world):
    cursor = world.get("/api/v1/tenants/?limit=5&ordering=weight").json()["next"].partition("cursor=")[2].split("&")[0]
    for text in ("nonsense", cursor):
        refused = world.get(f"/api/v1/api-keys/?ordering=-last_used_at&cursor={text}")
        assert (refused.status_code, refused.headers["Content-Type"]) == (404, "application/problem+json")


@pytest.mark.parametrize("most", [0, 2_000])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("K17", {"k17"}), ("key_17", {"k17"}), ("p17", {"k17"}), ("fb_p17_secret", {"k17"}), ("T17", {"k17"}),
        ("17", {"k17"}), ("k1", {"k1", *(f"k{n}" for n in range(10, 20))}), ("%", set()),
    ],
)  # fmt: skip
def test_keys_are_found_by_name_id_prefix_and_tenant(world, monkeypatch, text, found, most):
    monkeypatch.setattr(queries, "TENANTS_NAMED_MAX", most)
    page = world.get("/keys/", {"q": text}).context["page"]
    assert {key.name for key in page.rows} == found
    assert {row["name"] for row in world.get("/api/v1/api-keys/", {"q": text}).json()["results"]} == found


def test_a_search_of_keys_asks_the_same_for_one_tenant_as_for_many(world, django_assert_num_queries):
    for text in ("t07", "t"):
        with django_assert_num_queries(7):
            world.get("/keys/", {"q": text})


def test_tenants_are_found_by_their_keys_and_people_too(world):
    own = Tenant.objects.get(slug="t11")
    factories.person("tenant", tenant_row=own, name="grace")
    for text in ("t11", "T11", "k11", "p11", "GRACE"):
        assert [row.tenant.slug for row in world.get("/tenants/", {"q": text}).context["rows"]] == ["t11"], text


def test_a_search_does_not_reach_other_tenants(world, people):
    ApiKey.objects.filter(name="k11").update(tenant=Tenant.objects.get(slug="stranger"))
    for text in ("k11", "k12", "stranger"):
        assert people["tenant"].get("/tenants/", {"q": text}).context["rows"] == []
        assert people["tenant"].get("/keys/", {"q": text}).context["page"].rows == []
