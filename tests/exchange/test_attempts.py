"""A request that took more than one attempt costs what each of them cost, at the prices of whatever served it."""

from __future__ import annotations

import msgspec
from asgiref.sync import sync_to_async

from controlplane.core.reasons import Outcome
from controlplane.usage.models import Quarantine, UsageRecord
from tests.exchange.test_items import bulk
from tests.usage_rows import usage_row

__all__ = ["bulk"]
CACHED, OUTPUT = 560_000, 299


def attempts(bulk):
    """The first breaks off after 299 tokens; the class that the request falls back to answers it."""
    first = usage_row(
        bulk, prices=bulk.prices, prompt_tokens=CACHED, cached_tokens=CACHED, output_tokens=OUTPUT,
        outcome=Outcome.UPSTREAM_ERROR.code, status=502,
    )  # fmt: skip
    second = usage_row(
        bulk, prices=bulk.bulk_prices, request_id=first.request_id, attempt=2, class_id=bulk.bulk.pk,
        asked_class_id=bulk.chat.pk, prompt_tokens=CACHED, cached_tokens=0, output_tokens=40,
    )  # fmt: skip
    return first, second


def stored() -> dict[int, int]:
    """Attempt -> nanos of its record."""
    rows = UsageRecord.objects.values_list(
        "attempt", "charge_prompt_nanos", "charge_cached_nanos", "charge_output_nanos", "charge_gpu_nanos"
    )
    return {row[0]: sum(row[1:]) for row in rows}


async def test_each_attempt_is_priced_at_what_served_it(agent, bulk):
    answer = await agent.report(records=list(attempts(bulk)))
    assert answer.quarantined == 0
    a, b = bulk.prices, bulk.bulk_prices
    by_hand = {
        1: (CACHED * a.cached_nanos_per_mtok + OUTPUT * a.output_nanos_per_mtok) // 10**6,
        2: (CACHED * b.prompt_nanos_per_mtok + 40 * b.output_nanos_per_mtok) // 10**6,
    }
    assert await sync_to_async(stored)() == by_hand


async def test_an_attempt_at_the_prices_of_another_is_set_aside(agent, bulk):
    """The card of the attempt before it says nothing of the answer."""
    first, second = attempts(bulk)
    at_first = usage_row(bulk, prices=bulk.prices, prompt_tokens=CACHED, cached_tokens=0, output_tokens=40)
    lines = {name: getattr(at_first, name) for name in at_first.__struct_fields__ if name.startswith("charge_")}
    wrong = msgspec.structs.replace(second, **lines)
    assert (await agent.report(records=[first, wrong])).quarantined == 1
    assert list(await sync_to_async(stored)()) == [1]
    assert (await Quarantine.objects.aget()).reason == "wrong_charge"
