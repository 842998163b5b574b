"""The rules that a configuration has to hold before it may be pushed. A finding names the rule and says what to do.

An error refuses the push; a warning asks for a look. Pure: rows that were read before go in, findings come out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from controlplane.contracts.models import ContractVersion, WorkloadClass
from controlplane.core.flex_policy import leaves_contract_no_room
from controlplane.fleet.models import Pool, Slot
from controlplane.policy.compile import Source, allows_model

PPM = 1_000_000
# A grant is renewed with each report of about 1 s: under this a single late report would send every loan home.
GRANT_TTL_LEAST_S = 5
CONTRACT_METRICS_WITH_QUEUE = frozenset({"queue_wait", "ttft", "e2e"})


class Severity(StrEnum):
    ERROR = "error"
    WARNING = "warning"


class Rule(StrEnum):
    """Closed; docs and tests know every name."""

    NO_POOLS = "no_pools"
    POOL_WITHOUT_SLOTS = "pool_without_slots"
    CLASS_UNKNOWN = "class_unknown"
    CLASS_KIND_MISMATCH = "class_kind_mismatch"
    CLASS_MODEL_MISMATCH = "class_model_mismatch"
    DOWNGRADE_CYCLE = "downgrade_cycle"
    DOWNGRADE_NOT_SERVED = "downgrade_not_served"
    RETURN_SLACK_NOT_OVER_LEND_SLACK = "return_slack_not_over_lend_slack"
    MAX_LENT_OVER_FLEX = "max_lent_over_flex"
    FLOORS_OVER_SLOTS = "floors_over_slots"
    INTERACTIVE_WITHOUT_FLOOR = "interactive_without_floor"
    GRANT_TTL_TOO_SHORT = "grant_ttl_too_short"
    RATE_CARD_MISSING = "rate_card_missing"
    SAFE_RATE_MISSING = "safe_rate_missing"
    SAFE_RATE_EXPIRED = "safe_rate_expired"
    SAFE_RATE_UNREADABLE = "safe_rate_unreadable"
    CONTRACT_NO_ROOM = "contract_no_room"
    SLOT_WITHOUT_AGENT = "slot_without_agent"


@dataclass(frozen=True)
class Finding:
    """A rule that does not hold for one subject, with what an operator can do about it."""

    rule: Rule
    severity: Severity
    subject: str
    message: str
    action: str


@dataclass(frozen=True)
class Facts:
    """What rules look at beside the rows. `rest_of_ttft_ms`: by pool slug the usual time to first token without the
    queue, as measured; a pool without traffic is missing and counts as 0.
    """

    now: datetime
    rest_of_ttft_ms: dict[str, float] = field(default_factory=dict)


Check = Callable[[Source, Facts], Iterator[Finding]]


def validate(source: Source, facts: Facts) -> list[Finding]:
    """All findings, errors first, in the order of the rules."""
    found = [finding for check in CHECKS.values() for finding in check(source, facts)]
    order = list(Rule)
    return sorted(
        found, key=lambda item: (item.severity != Severity.ERROR, order.index(item.rule), item.subject, item.message)
    )


def errors(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity == Severity.ERROR]


def _error(rule: Rule, subject: str, message: str, action: str) -> Finding:
    return Finding(rule, Severity.ERROR, subject, message, action)


def _warning(rule: Rule, subject: str, message: str, action: str) -> Finding:
    return Finding(rule, Severity.WARNING, subject, message, action)


def _no_pools(source: Source, facts: Facts) -> Iterator[Finding]:
    if not source.pools:
        yield _error(Rule.NO_POOLS, "fleet", "There is no pool, so there is nobody to push to.", "Create a pool.")


def _pool_without_slots(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        if not source.slots_of(pool):
            yield _error(
                Rule.POOL_WITHOUT_SLOTS, pool.slug, "The pool has no slot.", "Add slots to it or archive the pool."
            )


def _home_classes(pool: Pool) -> list[tuple[str, str]]:
    return [
        (kind, slug) for kind, slug in (("interactive", pool.interactive_class), ("batch", pool.batch_class)) if slug
    ]


def _class_unknown(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        for kind, slug in _home_classes(pool):
            if source.class_by_slug(slug) is None:
                yield _error(
                    Rule.CLASS_UNKNOWN,
                    pool.slug,
                    f"Its {kind} class {slug} does not exist or is archived.",
                    "Choose another class for the pool or bring the class back.",
                )
    known = {row.slug for row in source.classes}
    for tenant in source.tenants:
        if known.issuperset(tenant.classes):
            continue
        for slug in sorted(set(tenant.classes)):
            if source.class_by_slug(slug) is None:
                yield _error(
                    Rule.CLASS_UNKNOWN,
                    tenant.slug,
                    f"It may use the class {slug}, which does not exist or is archived.",
                    "Take the class off the tenant's list or bring the class back.",
                )


def _class_kind_mismatch(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        for kind, slug in _home_classes(pool):
            row = source.class_by_slug(slug)
            if row is not None and row.kind != kind:
                yield _error(
                    Rule.CLASS_KIND_MISMATCH,
                    pool.slug,
                    f"Its {kind} class {slug} is a {row.kind} class.",
                    f"Choose a class of kind {kind}.",
                )


def _class_model_mismatch(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        for _, slug in _home_classes(pool):
            row = source.class_by_slug(slug)
            if row is not None and not allows_model(row, pool):
                yield _error(
                    Rule.CLASS_MODEL_MISMATCH,
                    pool.slug,
                    f"It serves {pool.model.name}, which its class {slug} does not allow.",
                    "Add the model to the class or give the pool another class.",
                )


def _downgrade_cycle(source: Source, facts: Facts) -> Iterator[Finding]:
    targets = {row.id: row.downgrade_to_id for row in source.classes}
    slugs = {row.id: row.slug for row in source.classes}
    reported: set[frozenset[int]] = set()
    for row in source.classes:
        path: list[int] = []
        at: int | None = row.id
        while at is not None and at not in path:
            path.append(at)
            at = targets.get(at)
        if at is None:
            continue
        ring = path[path.index(at) :]
        if frozenset(ring) not in reported:
            reported.add(frozenset(ring))
            names = " → ".join(slugs.get(item, str(item)) for item in [*ring, at])
            yield _error(
                Rule.DOWNGRADE_CYCLE,
                slugs[at],
                f"Downgrades go in a circle: {names}.",
                "Break the circle at one class.",
            )


def _downgrade_not_served(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        served = source.classes_of(pool)
        ids = {row.id for row in served}
        for row in served:
            if row.overload != WorkloadClass.Overload.DOWNGRADE:
                continue
            if row.downgrade_to_id is None or row.downgrade_to_id not in ids:
                yield _warning(
                    Rule.DOWNGRADE_NOT_SERVED,
                    row.slug,
                    f"It downgrades under overload, but pool {pool.slug} does not serve where it would go: "
                    "requests are refused instead.",
                    "Name a class that the pool serves, or choose another overload action.",
                )


def _return_slack(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        if pool.return_slack <= pool.lend_slack:
            yield _error(
                Rule.RETURN_SLACK_NOT_OVER_LEND_SLACK,
                pool.slug,
                f"Return slack {pool.return_slack} is not over lend slack {pool.lend_slack}: a slot that comes back "
                "would be lent again at once.",
                "Raise the return slack or lower the lend slack.",
            )


def _band(slots: list[Slot], band: str) -> list[Slot]:
    return [slot for slot in slots if slot.band == band]


def _max_lent(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        flex = len(_band(source.slots_of(pool), Slot.Band.FLEX))
        if pool.max_lent is not None and pool.max_lent > flex:
            yield _error(
                Rule.MAX_LENT_OVER_FLEX,
                pool.slug,
                f"At most {pool.max_lent} slots may be lent, but only {flex} are in the flex band.",
                "Lower the limit, leave it empty for all flex slots, or move slots to the flex band.",
            )


def _floors(source: Source, facts: Facts) -> Iterator[Finding]:
    """Minimum shares add up to at most 1; where slots are not shared the floor is the share, so none may be larger."""
    for pool in source.pools:
        slots = source.slots_of(pool)
        served = source.classes_of(pool)
        total = sum(row.min_share_ppm for row in served)
        if total > PPM:
            yield _error(
                Rule.FLOORS_OVER_SLOTS,
                pool.slug,
                f"Minimum shares of its classes add up to {total / PPM:.2f} of the slots.",
                "Lower minimum shares until they add up to 1 or less.",
            )
        if pool.isolation == Pool.Isolation.SHARED:
            continue
        for row in served:
            floor = len(_band(slots, row.kind))
            if slots and row.min_share_ppm * len(slots) > floor * PPM:
                yield _error(
                    Rule.FLOORS_OVER_SLOTS,
                    pool.slug,
                    f"Class {row.slug} is promised {row.min_share_ppm / PPM:.2f} of {len(slots)} slots, but its floor "
                    f"has {floor}.",
                    f"Move slots to the {row.kind} floor or lower the class's minimum share.",
                )


def _interactive_without_floor(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        slots = source.slots_of(pool)
        flex = _band(slots, Slot.Band.FLEX)
        reserved = pool.isolation == Pool.Isolation.RESERVED
        if reserved and flex and pool.interactive_class and not _band(slots, Slot.Band.INTERACTIVE):
            yield _error(
                Rule.INTERACTIVE_WITHOUT_FLOOR,
                pool.slug,
                "No slot is reserved for interactive work, so lending every flex slot would shut it out.",
                "Move at least one slot to the interactive floor.",
            )


def _grant_ttl(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        if pool.grant_ttl_s < GRANT_TTL_LEAST_S:
            yield _error(
                Rule.GRANT_TTL_TOO_SHORT,
                pool.slug,
                f"A grant lasts {pool.grant_ttl_s} s: one late report would send every lent slot home.",
                f"Set the grant's time to live to {GRANT_TTL_LEAST_S} s or more.",
            )


def _rate_card_missing(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        for row in source.classes_of(pool):
            in_force = any(
                card.class_slug == row.slug and card.model_id == pool.model_id and card.effective_from <= facts.now
                for card in source.cards
            )
            if not in_force:
                yield _error(
                    Rule.RATE_CARD_MISSING,
                    pool.slug,
                    f"No rate card is in force for class {row.slug} and model {pool.model.name}, so its requests could "
                    "not be charged.",
                    "Add a rate card (0 is allowed) for this class and model.",
                )


def _needs_safe_rate(pool: Pool, source: Source) -> bool:
    return pool.isolation == Pool.Isolation.RESERVED and bool(_band(source.slots_of(pool), Slot.Band.FLEX))


def _safe_rate(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        raw = pool.safe_rate or {}
        entries = raw.get("entries") or {}
        try:
            readable = all(int(slots) > 0 and float(rate) > 0 for slots, rate in entries.items())
        except (TypeError, ValueError):
            readable = False
        if not readable:
            yield _error(
                Rule.SAFE_RATE_UNREADABLE,
                pool.slug,
                "Its table of safe rates has an entry that is not a count of slots with a rate above 0.",
                "Correct the table: slots that serve interactive, and tested requests per second.",
            )
        elif not entries and _needs_safe_rate(pool, source):
            yield _warning(
                Rule.SAFE_RATE_MISSING,
                pool.slug,
                "It has flex slots but no tested safe rate, so none of them will be lent.",
                "Measure the safe rate with the interference test and enter it in the pool.",
            )


def _safe_rate_expired(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        text = str((pool.safe_rate or {}).get("valid_until") or "")
        if not text or not _needs_safe_rate(pool, source):
            continue
        try:
            until = datetime.fromisoformat(text)
        except ValueError:
            yield _error(
                Rule.SAFE_RATE_UNREADABLE,
                pool.slug,
                f"The safe rate's end of validity {text!r} is not a date and time.",
                "Write it like 2026-12-31T00:00:00Z.",
            )
            continue
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        if until <= facts.now:
            yield _warning(
                Rule.SAFE_RATE_EXPIRED,
                pool.slug,
                f"Its safe rate was valid until {until:%Y-%m-%d}; an expired table lends nothing.",
                "Measure it again.",
            )


def _waits_count(version: ContractVersion) -> bool:
    return version.objective == ContractVersion.Objective.LATENCY and version.metric in CONTRACT_METRICS_WITH_QUEUE


def _contract_no_room(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        if not _needs_safe_rate(pool, source):
            continue
        served = {row.id for row in source.classes_of(pool) if row.kind == WorkloadClass.Kind.INTERACTIVE}
        for version in source.versions_of(served):
            if not _waits_count(version):
                continue
            measured = facts.rest_of_ttft_ms.get(pool.slug, 0.0)
            rest = 0.0 if version.metric == ContractVersion.Metric.QUEUE_WAIT else measured
            if leaves_contract_no_room(
                lend_p95_us=pool.lend_p95_ms * 1_000,
                rest_of_ttft_us=round(rest * 1_000),
                threshold_us=version.threshold_ms * 1_000,
            ):
                yield _warning(
                    Rule.CONTRACT_NO_ROOM,
                    pool.slug,
                    f"Lending goes on up to a queue of {pool.lend_p95_ms} ms; with the usual {rest:.0f} ms after it, "
                    f"contract {version.contract.slug} ({version.threshold_ms} ms) can be missed while lending is "
                    "still allowed.",
                    "Lower the pool's lend p95.",
                )


def _slot_without_agent(source: Source, facts: Facts) -> Iterator[Finding]:
    for pool in source.pools:
        free = [slot.name for slot in source.slots_of(pool) if slot.agent_id is None]
        if free:
            yield _warning(
                Rule.SLOT_WITHOUT_AGENT,
                pool.slug,
                f"{len(free)} of its slots have no agent: {', '.join(sorted(free)[:5])}"
                f"{' and more' if len(free) > 5 else ''}.",
                "Enrol an agent for them; they follow by themselves, without another push.",
            )


CHECKS: dict[str, Check] = {
    "no_pools": _no_pools,
    "pool_without_slots": _pool_without_slots,
    "class_unknown": _class_unknown,
    "class_kind_mismatch": _class_kind_mismatch,
    "class_model_mismatch": _class_model_mismatch,
    "downgrade_cycle": _downgrade_cycle,
    "downgrade_not_served": _downgrade_not_served,
    "return_slack_not_over_lend_slack": _return_slack,
    "max_lent_over_flex": _max_lent,
    "floors_over_slots": _floors,
    "interactive_without_floor": _interactive_without_floor,
    "grant_ttl_too_short": _grant_ttl,
    "rate_card_missing": _rate_card_missing,
    "safe_rate": _safe_rate,
    "safe_rate_expired": _safe_rate_expired,
    "contract_no_room": _contract_no_room,
    "slot_without_agent": _slot_without_agent,
}
