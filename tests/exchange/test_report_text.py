"""Text that clients or agents choose never costs the records beside it."""

from __future__ import annotations

import time
import uuid

from asgiref.sync import sync_to_async

from controlplane.contracts.ingest import is_sound
from controlplane.usage.models import DecisionSample, Quarantine, UsageRecord
from controlplane.wire import report as wire
from tests.usage_rows import usage_row

MINUTE_US = time.time_ns() // 60_000_000_000 * 60_000_000


async def test_a_sample_that_quotes_a_zero_character_costs_no_record(agent, world):
    """A client may name a model with a zero character; the refusal's sample quotes it."""
    sample = wire.DecisionSample(
        str(uuid.uuid4()), time.time_ns() // 1000, world.tenant.pk, world.key.pk, world.chat.pk, "reject\0", 3,
        [wire.Check("model\0", "a\0b", "\0", False)],
    )  # fmt: skip
    records = [usage_row(world, prices=world.prices) for _ in range(3)]
    answer = await agent.report(records=records, samples=[sample])
    assert answer.quarantined == 0

    def read():
        kept = DecisionSample.objects.get()
        return UsageRecord.objects.count(), Quarantine.objects.count(), kept.decision, kept.checks[0]["value"]

    assert await sync_to_async(read)() == (3, 0, "reject", "a\ufffdb")


async def test_a_reason_with_a_zero_character_costs_no_record(agent, world):
    records = [usage_row(world, prices=world.prices)]
    await agent.report(records=records, refused_revision=1, refused_reason="no\0")
    assert await sync_to_async(UsageRecord.objects.count)() == 1
    assert await sync_to_async(Quarantine.objects.count)() == 0


def test_a_cause_with_a_zero_character_is_not_sound():
    def of(cause):
        return wire.ObjectiveCount(1, MINUTE_US, 1, 1, 0, 0, 0, {cause: 1})

    assert is_sound(of("slow"))
    assert not is_sound(of("slow\0"))
