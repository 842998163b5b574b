"""Rates: added with effective dates and a reason, never changed; prices checked; seen-before-write."""

import threading
from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.db import connection

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.ledger import rates
from controlplane.ledger.models import CostRate, RateCard
from controlplane.tenants.actions import Stale
from tests import factories

FIN = Actor(id=None, name="fin", role="finance")
CARD = {"prompt_nanos_per_mtok": 500_000_000, "output_nanos_per_mtok": 1_500_000_000}


@pytest.fixture
def pool(installation):
    factories.workload_class("chat")
    return factories.pool("chat")


def add_cost(now, nanos=2_500_000_000, reason="contract 12", **values):
    return rates.add_cost_rate(pool_slug="chat", nanos_per_slot_hour=nanos, actor=FIN, now=now, reason=reason, **values)


def add_card(now, values=CARD, reason="price list", **more):
    return rates.add_rate_card(
        class_slug="chat", model="llama-70b", values=values, actor=FIN, now=now, reason=reason, **more
    )


def test_a_cost_rate_is_added_and_the_old_one_stays(pool, now):
    add_cost(now)
    add_cost(now, nanos=2_600_000_000, effective_from=now + timedelta(days=1))
    assert list(CostRate.objects.order_by("effective_from").values_list("nanos_per_slot_hour", flat=True)) == [
        2_500_000_000,
        2_600_000_000,
    ]
    entry = AuditEntry.objects.filter(action="cost_rate.add").latest("id")
    assert (entry.before, entry.reason) == ({"nanos_per_slot_hour": 2_500_000_000}, "contract 12")


def test_a_cost_rate_may_begin_in_the_past_but_not_twice_at_one_instant(pool, now):
    earlier = now - timedelta(days=3)
    assert add_cost(now, effective_from=earlier).effective_from == earlier
    with pytest.raises(ValidationError, match="very instant"):
        add_cost(now, effective_from=earlier)


@pytest.mark.parametrize("nanos", [-1, 10**15 + 1, True, 2.5])
def test_prices_are_integer_nanos_of_zero_or_more(pool, now, nanos):
    with pytest.raises(ValidationError):
        add_cost(now, nanos=nanos)
    assert not CostRate.objects.exists()


def test_a_card_fills_what_is_left_out_and_the_next_inherits(pool, now):
    first = add_card(now)
    assert (first.cached_nanos_per_mtok, first.gpu_nanos_per_slot_hour, first.discount_ppm) == (500_000_000, 0, 0)
    second = add_card(now, {"discount_ppm": 500_000}, effective_from=now + timedelta(hours=1))
    assert (second.prompt_nanos_per_mtok, second.discount_ppm) == (500_000_000, 500_000)
    assert RateCard.objects.get(pk=first.pk).discount_ppm == 0


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prompt_nanos_per_mtok": 1}, "output_nanos_per_mtok"),
        ({**CARD, "cached_nanos_per_mtok": 600_000_000}, "cached_nanos_per_mtok"),
        ({**CARD, "discount_ppm": 1_000_001}, "discount_ppm"),
        ({**CARD, "id": 4}, "id"),
    ],
)
def test_a_card_that_cannot_be_is_refused_by_field(pool, now, values, field):
    with pytest.raises(ValidationError) as error:
        add_card(now, values)
    assert list(error.value.error_dict) == [field]


def test_a_card_never_begins_before_now_or_before_the_newest(pool, now):
    add_card(now)
    add_card(now, {"discount_ppm": 1}, effective_from=now + timedelta(days=2))
    for instant in (now - timedelta(seconds=1), now + timedelta(days=1)):
        with pytest.raises(ValidationError) as error:
            add_card(now, {"discount_ppm": 2}, effective_from=instant)
        assert list(error.value.error_dict) == ["effective_from"]


def test_a_card_without_a_change_or_a_reason_is_refused(pool, now):
    add_card(now)
    with pytest.raises(ValidationError, match="Nothing differs"):
        add_card(now, CARD, effective_from=now + timedelta(hours=1))
    with pytest.raises(ValidationError) as error:
        add_card(now, {"discount_ppm": 1}, reason="", effective_from=now + timedelta(hours=1))
    assert list(error.value.error_dict) == ["reason"]


@pytest.mark.django_db(transaction=True)
def test_two_people_who_saw_the_same_card_cannot_both_add_the_next(installation, now):
    factories.pool("chat")
    first = add_card(now)
    outcomes: list[str] = []
    barrier = threading.Barrier(2)

    def add(discount: int) -> None:
        barrier.wait()
        try:
            add_card(
                now, {"discount_ppm": discount}, previous_id=first.pk, effective_from=now + timedelta(hours=discount)
            )
            outcomes.append("added")
        except Stale:
            outcomes.append("stale")
        finally:
            connection.close()

    threads = [threading.Thread(target=add, args=(discount,)) for discount in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) == ["added", "stale"]
    assert RateCard.objects.count() == 2
