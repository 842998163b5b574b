"""Attribution of a case in JSON form: what would each tenant have paid."""

from fractions import Fraction
from typing import Any

from controlplane.core.attribution import Attribution, IdleMethod, IdlePolicy, PoolInterval, Usage, attribute
from controlplane.core.case_input import Case, exact, mapping, required, rows, text, us_of_seconds, whole
from controlplane.core.idle_time import Band, OwnedState, OwnerInterval, SlotTenure


def explain(case: Case) -> dict[str, Any]:
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


def pool_of(case: Case) -> PoolInterval:
    """The pool interval that a case describes."""
    span = rows(case, "interval_s")
    if len(span) != 2:
        raise ValueError("'interval_s' must be [from, to]")
    return PoolInterval(
        us_of_seconds(span[0], "interval_s"),
        us_of_seconds(span[1], "interval_s"),
        whole(case, "rate_nanos_per_slot_hour"),
        tuple(_slot(slot) for slot in rows(case, "slots")),
        tuple(_usage(usage) for usage in rows(case, "usage", [])),
        _policy(case),
        exact(case.get("lend_price_share", 0), "lend_price_share"),
    )


def _slot(case: Any) -> SlotTenure:
    owners = tuple(_owner(owner) for owner in rows(case, "owners"))
    band = case.get("band")
    gpu_share = exact(case.get("gpu_share", 1), "gpu_share")
    if gpu_share <= 0:
        raise ValueError("'gpu_share' must be over 0")
    return SlotTenure(text(case, "slot"), owners, None if band is None else _member(Band, band, "band"), gpu_share)


def _owner(case: Any) -> OwnerInterval:
    class_ = required(case, "class")
    if class_ is not None and (not isinstance(class_, str) or not class_):
        raise ValueError(f"'class' of an owner must be a name or null, not {class_!r}")
    return OwnerInterval(
        class_,
        us_of_seconds(required(case, "from_s"), "from_s"),
        us_of_seconds(required(case, "to_s"), "to_s"),
        _member(OwnedState, case.get("state", "ready"), "state"),
        case.get("lender"),
    )


def _usage(case: Any) -> Usage:
    slot = case.get("slot") if isinstance(case, dict) else None
    return Usage(text(case, "tenant"), text(case, "class"), whole(case, "gpu_us"), slot, whole(case, "repeated_us", 0))


def _policy(case: Case) -> IdlePolicy:
    idle = case.get("idle", "usage")
    if not isinstance(idle, dict):
        idle = {"default": idle}
    return IdlePolicy(
        _member(IdleMethod, idle.get("default", "usage"), "idle"),
        {class_: _member(IdleMethod, method, "idle") for class_, method in mapping(idle, "by_class").items()},
        {band: _member(IdleMethod, method, "idle") for band, method in mapping(idle, "by_band").items()},
        {class_: _weights(mapping(case["weights"], class_)) for class_ in mapping(case, "weights")},
    )


def _weights(case: Case) -> dict[str, Fraction]:
    return {tenant: exact(weight, "weights") for tenant, weight in case.items()}


def _member(kind: Any, value: Any, key: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{key!r} must be one of {', '.join(kind)}, not {value!r}") from None
