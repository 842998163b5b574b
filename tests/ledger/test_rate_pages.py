"""The page of rates, its forms and its REST: exact money, before and after, history, roles."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.ledger import rates
from controlplane.ledger.models import CostRate, RateCard
from tests import factories

FIN = Actor(id=None, name="fin", role="finance")
JSON = "application/json"


@pytest.fixture(autouse=True)
def quick_passwords(settings):
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def pool(people):
    factories.workload_class("chat")
    return factories.pool("chat")


@pytest.fixture
def card(pool):
    return rates.add_rate_card(
        class_slug="chat", model="llama-70b", actor=FIN, now=timezone.now() - timedelta(days=1), reason="price list",
        values={"prompt_nanos_per_mtok": 1_400_000_000, "output_nanos_per_mtok": 4_400_000_000},
    )  # fmt: skip


def text(response) -> str:
    return response.content.decode()


def card_data(card, **changes):
    return {
        "prompt_nanos_per_mtok": "1.40", "cached_nanos_per_mtok": "", "output_nanos_per_mtok": "4.40",
        "gpu_nanos_per_slot_hour": "", "discount": "0", "version": card.pk, **changes,
    }  # fmt: skip


def test_what_has_no_rate_is_first_and_marked(card, people):
    page = text(people["viewer"].get(reverse("rates")))
    assert "1 missing" in page and "Its hours cannot be costed" in page and "4.40" in page
    assert "New rate" not in page


def test_a_cost_rate_is_typed_as_a_decimal_and_kept_exactly(pool, people):
    address = reverse("cost-rate-new", args=["chat"])
    data = {"nanos_per_slot_hour": "2.512345678", "version": 0}
    review = text(people["finance"].post(address, data))
    assert "2.512345678 EUR" in review
    assert not CostRate.objects.exists()
    saved = people["finance"].post(address, {**data, "confirm": "1", "reason": "contract 12"})
    assert saved.status_code == 302
    assert CostRate.objects.get().nanos_per_slot_hour == 2_512_345_678


@pytest.mark.parametrize("typed", ["2,50", "-1", "1e99", "0.0000000001", "", "two"])
def test_what_is_no_exact_price_is_refused_beside_its_field(pool, people, typed):
    data = {"nanos_per_slot_hour": typed, "version": 0}
    response = people["finance"].post(reverse("cost-rate-new", args=["chat"]), data)
    assert response.status_code == 400
    assert 'href="#id_nanos_per_slot_hour"' in text(response)


def test_a_new_card_leaves_the_old_one_and_both_stand_in_the_history(card, people):
    address = reverse("rate-card-new", args=["chat", card.model_id])
    data = card_data(card, output_nanos_per_mtok="5", discount="12.5")
    review = text(people["finance"].post(address, data))
    assert "4.40" in review and "5.00" in review and "12.5" in review
    people["finance"].post(address, {**data, "confirm": "1", "reason": "new list"})
    newest = RateCard.objects.latest("id")
    assert (newest.output_nanos_per_mtok, newest.discount_ppm, newest.cached_nanos_per_mtok) == (
        5_000_000_000,
        125_000,
        1_400_000_000,
    )
    assert RateCard.objects.get(pk=card.pk).output_nanos_per_mtok == 4_400_000_000
    assert "2 versions" in text(people["viewer"].get(reverse("rates")))


def test_who_was_slower_is_told_and_changes_nothing(card, people):
    data = card_data(card, output_nanos_per_mtok="5")
    rates.add_rate_card(
        class_slug="chat", model="llama-70b", actor=FIN, now=timezone.now(), reason="other", values={"discount_ppm": 1}
    )
    address = reverse("rate-card-new", args=["chat", card.model_id])
    response = people["finance"].post(address, {**data, "confirm": "1", "reason": "mine"})
    assert response.status_code == 409
    assert RateCard.objects.count() == 2


def test_only_money_roles_write(pool, people):
    for person in ("oncall", "viewer", "tenant"):
        assert people[person].get(reverse("cost-rate-new", args=["chat"])).status_code == 403
    assert people["tenant"].get(reverse("rates")).status_code == 403


def test_the_page_needs_as_many_statements_for_one_as_for_six(card, people, django_assert_num_queries):
    for number in range(5):
        factories.pool(f"pool-{number}", model=f"model-{number}")
    viewer = people["viewer"]
    with django_assert_num_queries(11):
        viewer.get(reverse("rates"))


def test_rates_are_searched_ordered_and_exported_as_shown(card, people):
    for number in range(3):
        factories.pool(f"pool-{number}", model=f"model-{number}", gpu_type="A100")
    rates.add_cost_rate(pool_slug="pool-1", nanos_per_slot_hour=1, actor=FIN, now=timezone.now(), reason="r")
    client, address = people["viewer"], reverse("rates")

    def shown(**asked):
        context = client.get(address, asked).context
        return [line.pool.slug for line in context["costs"]], [line.model.name for line in context["cards"]]

    assert shown()[0] == ["chat", "pool-0", "pool-2", "pool-1"], "what has no rate is first"
    assert shown(sort="name")[0] == ["chat", "pool-0", "pool-1", "pool-2"]
    assert shown(sort="newest")[0][0] == "pool-1"
    assert shown(sort="newest")[1][0] == "llama-70b"
    assert shown(q="A100")[0] == ["pool-0", "pool-2", "pool-1"]
    assert shown(q="MODEL-2") == ([], ["model-2"])
    assert shown(q="nothing") == ([], [])
    page = text(client.get(address, {"q": "nothing"}))
    assert "No cost rate matches" in page and "No rate card matches" in page and "7 missing" not in page
    assert "0 of 8" in page
    lines = b"".join(client.get(address, {"q": "pool-1", "format": "cost.csv"}).streaming_content).decode().split()
    assert len(lines) == 2 and lines[1].startswith("pool-1,A100,")


def test_rest_takes_money_as_text_only(pool, people):
    finance = people["finance"]
    body = {"pool": "chat", "per_slot_hour": "2.50", "reason": "contract 12"}
    made = finance.post("/api/v1/cost-rates/", body, content_type=JSON)
    assert (made.status_code, made.json()["per_slot_hour"]) == (201, "2.50")
    refused = finance.post("/api/v1/cost-rates/", {**body, "per_slot_hour": 2.5}, content_type=JSON)
    assert (refused.status_code, list(refused.json()["errors"])) == (400, ["per_slot_hour"])
    card = {
        "workload_class": "chat", "model": "llama-70b", "prompt_per_mtok": "1.4", "output_per_mtok": "4.4",
        "reason": "list",
    }  # fmt: skip
    made = finance.post("/api/v1/rate-cards/", card, content_type=JSON)
    assert (made.status_code, made.json()["cached_per_mtok"]) == (201, "1.40")
    assert people["oncall"].post("/api/v1/rate-cards/", card, content_type=JSON).status_code == 403
    rows = people["viewer"].get("/api/v1/rate-cards/", {"workload_class": "chat"}).json()["results"]
    assert [row["output_per_mtok"] for row in rows] == ["4.40"]
