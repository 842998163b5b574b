"""Usage rows as agents send them, priced by the core; every field can be given by name."""

from __future__ import annotations

import time
import uuid

import msgspec

from controlplane.core.pricing import RateCard as Prices
from controlplane.core.pricing import charge
from controlplane.core.reasons import Outcome
from controlplane.wire.report import FLAG_STREAMED, UsageRow


def usage_row(world, *, prices: Prices | None = None, **given) -> UsageRow:
    """A completed streamed chat request of acme that ended now, on the first slot of `world`."""
    ended = given.pop("ended_us", time.time_ns() // 1000 - 1_000_000)
    values = {
        "request_id": str(uuid.uuid4()), "arrived_us": ended - 600_000, "ended_us": ended, "attempt": 1,
        "slot_id": world.slots[0].pk, "tenant_id": world.tenant.pk, "key_id": world.key.pk,
        "class_id": world.chat.pk, "asked_class_id": world.chat.pk, "model_id": world.pool.model_id, "job": "",
        "revision": 0, "rate_version": 0, "outcome": Outcome.COMPLETED.code, "status": 200, "flags": FLAG_STREAMED,
        "prompt_tokens": 1_000, "cached_tokens": 200, "output_tokens": 150, "admission_us": 40, "queue_us": 5_000,
        "batch_wait_us": 0, "preprocess_us": 900, "prefill_us": 90_000, "decode_us": 400_000, "return_us": 60,
        "ttft_us": 96_000, "gpu_us": 250_000, "estimated_gpu_us": 240_000, "charge_prompt_nanos": 0,
        "charge_cached_nanos": 0, "charge_output_nanos": 0, "charge_gpu_nanos": 0, "client_request_id": "",
    }  # fmt: skip
    values |= given
    if prices is not None:
        lines = charge(
            prices,
            prompt_tokens=values["prompt_tokens"],
            cached_tokens=values["cached_tokens"],
            output_tokens=values["output_tokens"],
            gpu_us=values["gpu_us"],
        )
        values |= {
            "rate_version": prices.rate_version, "charge_prompt_nanos": lines.prompt_nanos,
            "charge_cached_nanos": lines.cached_nanos, "charge_output_nanos": lines.output_nanos,
            "charge_gpu_nanos": lines.gpu_nanos,
        }  # fmt: skip
        values |= {name: given[name] for name in given if name.startswith("charge_")}
    return UsageRow(**values)


def as_tuple(row: UsageRow) -> tuple:
    return msgspec.structs.astuple(row)
