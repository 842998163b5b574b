"""Reports: exactly once, in order, whatever is doubled, lost or reordered on the way."""

from __future__ import annotations

from asgiref.sync import sync_to_async

from controlplane.usage.models import RollupDelta, UsageRecord
from tests.usage_rows import usage_row


async def test_a_report_is_stored_and_acknowledged(agent, world):
    rows = [usage_row(world, prices=world.prices) for _ in range(3)]
    answer = await agent.report(records=rows)
    assert (answer.accepted_through, answer.repeat, answer.quarantined) == (1, False, 0)
    stored = await sync_to_async(lambda: list(UsageRecord.objects.values_list("request_id", "charge_output_nanos")))()
    assert {str(key) for key, _ in stored} == {row.request_id for row in rows}
    assert {nanos for _, nanos in stored} == {rows[0].charge_output_nanos}
    deltas = await sync_to_async(lambda: list(RollupDelta.objects.values_list("requests", "prompt_tokens")))()
    assert sum(requests for requests, _ in deltas) == 3
    assert sum(tokens for _, tokens in deltas) == 3_000
