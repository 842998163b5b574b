"""What is saved, compiled and compared: remembered by the rows that it is made of, until one of them changes.

Ten thousand tenants in forty pools are a hundred thousand rows of policy: compiling them takes longer than a page may,
and people who look at a draft ask again and again. Nothing here is told to be dropped: other rows are another key.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Final, TypeVar

import msgspec
from django.db.models import Model

from controlplane.policy.compile import Source, compile_source
from controlplane.policy.diff import Change, diff
from controlplane.policy.models import Revision
from controlplane.policy.queries import configuration_of

KEPT_MOST: Final = 8
_FOR_EVER: Final = datetime.max.replace(tzinfo=UTC)
Answer = TypeVar("Answer")
_plain = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Compared:
    """The digest of what is saved, and what changes with it."""

    digest: str
    changes: list[Change]


def compared(source: Source, against: Revision | None, now: datetime) -> Compared:
    """What these rows compile to against a revision, None before the first."""
    return remembered(source, ("compared", against and against.number), now, lambda: _compared(source, against, now))


def _compared(source: Source, against: Revision | None, now: datetime) -> Compared:
    configuration = compile_source(source)
    if against is not None and against.digest == configuration.digest:
        return Compared(configuration.digest, [])
    before = configuration_of(against.number) if against else None
    return Compared(configuration.digest, diff(before, configuration, now=now))


def fingerprint(source: Source) -> str:
    """A digest of all columns that were read: equal rows compile to equal documents."""
    rows = (source.pools, source.slots, source.classes, source.versions, source.cards)
    models = [part for part in (row.model for row in source.pools) if part is not None]
    contracts = [version.contract for version in source.versions]
    whole = [
        source.installation, sorted(source.hard_budget_tenants), source.tenants,
        *([_columns(row) for row in part] for part in (*rows, models, contracts)),
    ]  # fmt: skip
    return hashlib.sha256(_plain.encode(whole)).hexdigest()


def _columns(row: Model) -> dict[str, Any]:
    return {name: value for name, value in row.__dict__.items() if not name.startswith("_")}


@dataclass(frozen=True, slots=True)
class _Kept:
    made_at: datetime
    until: datetime
    answer: Any


_kept: OrderedDict[Hashable, _Kept] = OrderedDict()
_lock = Lock()


def remembered(source: Source, beside: Hashable, now: datetime, make: Callable[[], Answer]) -> Answer:
    """What `make` says of these rows and of what stands `beside` them. It may depend on the time only through what of
    the rows is in force by then: what begins later ends it.
    """
    key = fingerprint(source), beside
    with _lock:
        kept = _kept.get(key)
    if kept is not None and kept.made_at <= now < kept.until:
        answer: Answer = kept.answer
        return answer
    answer = make()
    with _lock:
        _kept[key] = _Kept(now, _next_change(source, now), answer)
        _kept.move_to_end(key)
        while len(_kept) > KEPT_MOST:
            _kept.popitem(last=False)
    return answer


def _next_change(source: Source, now: datetime) -> datetime:
    begins: Iterable[datetime] = (row.effective_from for part in (source.versions, source.cards) for row in part)
    return min((at for at in begins if at > now), default=_FOR_EVER)
