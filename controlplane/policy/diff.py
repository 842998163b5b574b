"""What changes from one configuration to another, in words that an operator reads: subject, sentence, before, after."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from controlplane.policy.configuration import Configuration, read_instant
from controlplane.policy.wording import (
    CLASS_FIELDS,
    NONE,
    POOL_FIELDS,
    TENANT_FIELDS,
    Field,
    class_text,
    contract_text,
    rate_text,
    slot_fields,
    slot_text,
    tenant_text,
)
from controlplane.wire.policy import ContractPolicy, PolicyDocument, PoolPolicy, RatePolicy


class Change(NamedTuple):
    """One change. `kind` is pool, tenant, class, contract or rate; `subject` its name; texts carry their units."""

    kind: str
    subject: str
    sentence: str
    before: str
    after: str


@dataclass(frozen=True)
class Group:
    """The changes of one subject."""

    kind: str
    subject: str
    changes: tuple[Change, ...]


KIND_ORDER = ("pool", "tenant", "class", "contract", "rate")


def diff(before: Configuration | None, after: Configuration, *, now: datetime) -> list[Change]:
    """All changes, once each however many pools carry them. `before` None is the first push: everything is new.

    Contract versions and rate cards that a later one in force has replaced are no change when they leave.
    """
    old = before.pools if before else {}
    found: dict[Change, None] = {}
    for slug in sorted(old.keys() | after.pools.keys()):
        for change in _pool_changes(slug, old.get(slug), after.pools.get(slug), now):
            found.setdefault(change)
    return sorted(found, key=lambda change: (KIND_ORDER.index(change.kind), change.subject))


def place(group: Group) -> tuple[int, str]:
    """Where a group stands among others."""
    return KIND_ORDER.index(group.kind), group.subject


def groups(changes: list[Change]) -> list[Group]:
    by_subject: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        by_subject.setdefault((change.kind, change.subject), []).append(change)
    return [Group(kind, subject, tuple(rows)) for (kind, subject), rows in by_subject.items()]


def summary(changes: list[Change], most: int = 100) -> list[str]:
    """One line per change, for the audit log and the terminal."""
    lines = [f"{item.kind} {item.subject}: {item.sentence} {item.before} → {item.after}" for item in changes[:most]]
    return lines + ([f"and {len(changes) - most} more"] if len(changes) > most else [])


def tally(changes: list[Change]) -> str:
    """`8 changes: 2 tenants, 1 pool`."""
    subjects = {(item.kind, item.subject) for item in changes}
    counted = [(sum(kind == name for kind, _ in subjects), name) for name in KIND_ORDER]
    parts = [f"{count} {_plural(name, count)}" for count, name in counted if count]
    return f"{len(changes)} {_plural('change', len(changes))}" + (f": {', '.join(parts)}" if parts else "")


def _plural(word: str, count: int) -> str:
    if count == 1:
        return word
    return word + ("es" if word.endswith("s") else "s")


def _pool_changes(slug: str, old: PolicyDocument | None, new: PolicyDocument | None, now: datetime) -> Iterator[Change]:
    if old == new:
        return
    if new is None:
        yield Change("pool", slug, "The pool is archived; its agents keep what they have.", "in the policy", NONE)
        return
    if old is None:
        text = f"{len(new.pool.slots)} slots, {new.pool.model}"
        yield Change("pool", slug, "The pool is new.", NONE, text)
    else:
        yield from _fields("pool", slug, old.pool, new.pool, POOL_FIELDS)
        yield from _slots(slug, old.pool, new.pool)
    yield from _keyed("tenant", old.tenants if old else [], new.tenants, TENANT_FIELDS, tenant_text)
    yield from _keyed("class", old.classes if old else [], new.classes, CLASS_FIELDS, class_text)
    yield from _contracts(old, new, now)
    yield from _rates(old, new, now)


def _fields(kind: str, subject: str, old: Any, new: Any, fields: tuple[Field, ...]) -> Iterator[Change]:
    for field in fields:
        before, after = _at(old, field.path), _at(new, field.path)
        if before != after:
            yield Change(kind, subject, field.sentence(before, after), field.text(before), field.text(after))


def _at(row: Any, path: str) -> Any:
    for name in path.split("."):
        row = getattr(row, name)
    return row


def _keyed(
    kind: str, old: list[Any], new: list[Any], fields: tuple[Field, ...], text: Callable[[Any], str]
) -> Iterator[Change]:
    before = {row.id: row for row in old}
    after = {row.id: row for row in new}
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            yield Change(kind, after[key].slug, f"The {kind} is new here.", NONE, text(after[key]))
        elif key not in after:
            yield Change(kind, before[key].slug, f"The {kind} may no longer be served.", text(before[key]), NONE)
        elif before[key] != after[key]:
            yield from _fields(kind, after[key].slug, before[key], after[key], fields)


def _slots(slug: str, old: PoolPolicy, new: PoolPolicy) -> Iterator[Change]:
    before = {slot.id: slot for slot in old.slots}
    after = {slot.id: slot for slot in new.slots}
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            yield Change("pool", slug, f"Slot {after[key].name} is new.", NONE, slot_text(after[key]))
        elif key not in after:
            yield Change("pool", slug, f"Slot {before[key].name} leaves the pool.", slot_text(before[key]), NONE)
        else:
            yield from _fields("pool", slug, before[key], after[key], slot_fields(after[key].name))


def _contracts(old: PolicyDocument | None, new: PolicyDocument, now: datetime) -> Iterator[Change]:
    before = {row.version_id: row for row in (old.contracts if old else [])}
    after = {row.version_id: row for row in new.contracts}
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            earlier = _predecessor(after[key], before.values())
            known = contract_text(earlier) if earlier else NONE
            yield Change("contract", after[key].slug, _from(after[key], now), known, contract_text(after[key]))
        elif key not in after and not _replaced(before[key], after.values(), now, lambda row: row.slug):
            yield Change("contract", before[key].slug, "The contract is withdrawn.", contract_text(before[key]), NONE)


def _rates(old: PolicyDocument | None, new: PolicyDocument, now: datetime) -> Iterator[Change]:
    before = {row.rate_version: row for row in (old.rates if old else [])}
    after = {row.rate_version: row for row in new.rates}
    model = new.pool.model
    for key in sorted(before.keys() | after.keys()):
        if key not in before:
            subject = f"{after[key].class_slug} on {model}"
            earlier = [row for row in before.values() if row.class_slug == after[key].class_slug]
            known = rate_text(max(earlier, key=lambda row: row.effective_from)) if earlier else NONE
            yield Change("rate", subject, _from(after[key], now), known, rate_text(after[key]))
        elif key not in after and not _replaced(before[key], after.values(), now, lambda row: row.class_slug):
            subject = f"{before[key].class_slug} on {model}"
            yield Change("rate", subject, "Not charged here any more.", rate_text(before[key]), NONE)


def _from(row: ContractPolicy | RatePolicy, now: datetime) -> str:
    at = read_instant(row.effective_from)
    return "In force at once." if at <= now else f"From {at:%Y-%m-%d %H:%M} UTC."


def _predecessor(row: ContractPolicy, others: Any) -> ContractPolicy | None:
    same = [other for other in others if other.slug == row.slug]
    return max(same, key=lambda other: other.effective_from) if same else None


def _replaced(row: Any, others: Any, now: datetime, key: Callable[[Any], str]) -> bool:
    return any(
        key(other) == key(row) and read_instant(row.effective_from) <= read_instant(other.effective_from) <= now
        for other in others
    )
