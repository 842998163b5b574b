"""Attribution of a case in JSON form: what would each tenant have paid."""

from fractions import Fraction
from typing import Any

from controlplane.core.attribution import Attribution, IdleMethod, IdlePolicy, PoolInterval, Usage, attribute
from controlplane.core.idle_time import Band, OwnedState, OwnerInterval, SlotTenure
from controlplane.core.json_reader import ABSENT, JsonReader


def explain(case: object) -> dict[str, Any]:
    """Answer of one case.

    Input: `rate_nanos_per_slot_hour`, `interval_s` [from, to], `slots` [{slot, owners [{class, from_s, to_s, state,
    lender}], band, gpu_share}], `usage` [{tenant, class, gpu_us, slot, repeated_us}], `idle` (a method, or {default,
    by_class, by_band}), `weights` {class: {tenant: weight}}, `lend_price_share`. Raises ValueError for unusable input.
    """
    return answer(attribute(pool_of(case)))


def answer(result: Attribution) -> dict[str, Any]:
    """Result in the keys of the cases."""
    return {
        "total_nanos": result.total_nanos,
        "by_tenant_nanos": result.by_tenant(),
        "by_class_nanos": result.by_class(),
        "by_kind_nanos": result.by_kind(),
        "owned_us": result.owned_us,
        "busy_us": result.busy_us,
        "lines": [
            {"tenant": line.tenant, "class": line.class_, "kind": str(line.kind), "nanos": line.nanos}
            for line in result.lines
        ],
        "unobserved": [
            {"slots": list(finding.slots), "owned_us": finding.owned_us, "busy_us": finding.busy_us}
            for finding in result.findings
        ],
    }


def pool_of(case: object) -> PoolInterval:
    """The pool interval that a case describes."""
    reader = JsonReader(case, "")
    span = reader.seconds_us_items("interval_s")
    if len(span) != 2:
        raise ValueError("interval_s: must be [from, to]")
    return PoolInterval(
        span[0],
        span[1],
        reader.integer("rate_nanos_per_slot_hour"),
        tuple(_slot(slot) for slot in reader.items("slots")),
        tuple(_usage(usage) for usage in reader.items("usage", [])),
        _policy(reader),
        reader.decimal("lend_price_share", 0),
    )


def _slot(slot: JsonReader) -> SlotTenure:
    owners = tuple(_owner(owner) for owner in slot.items("owners"))
    gpu_share = slot.decimal("gpu_share", 1)
    if gpu_share <= 0:
        raise ValueError(slot.located("gpu_share: must be over 0"))
    band = None if slot.take("band", None) is None else slot.choice("band", Band, ABSENT)
    return SlotTenure(slot.text("slot"), owners, band, gpu_share)


def _owner(owner: JsonReader) -> OwnerInterval:
    return OwnerInterval(
        None if owner.take("class") is None else owner.text("class"),
        owner.seconds_us("from_s"),
        owner.seconds_us("to_s"),
        owner.choice("state", OwnedState, "ready"),
        owner.take("lender", None),
    )


def _usage(usage: JsonReader) -> Usage:
    return Usage(
        usage.text("tenant"),
        usage.text("class"),
        usage.integer("gpu_us"),
        usage.take("slot", None),
        usage.integer("repeated_us", 0),
    )


def _policy(reader: JsonReader) -> IdlePolicy:
    """`idle` is a method, or an object with one by default, by class and by band."""
    methods = isinstance(reader.take("idle", "usage"), dict)
    idle = reader.part("idle") if methods else JsonReader({}, "idle.")
    weights = reader.part_or_empty("weights")
    return IdlePolicy(
        idle.choice("default", IdleMethod, "usage") if methods else reader.choice("idle", IdleMethod, "usage"),
        _methods(idle.part_or_empty("by_class")),
        _methods(idle.part_or_empty("by_band")),
        {class_: _weights(weights.part(class_)) for class_ in weights.names()},
    )


def _methods(said: JsonReader) -> dict[str, IdleMethod]:
    return {name: said.choice(name, IdleMethod, ABSENT) for name in said.names()}


def _weights(said: JsonReader) -> dict[str, Fraction]:
    return {tenant: said.decimal(tenant) for tenant in said.names()}
