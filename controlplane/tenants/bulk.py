"""One action on many rows of a list: what was selected, what would happen to each row, and what happened.

Each row is an action of its own: its own transaction, its own version check, its own audit entry. One transaction for
all of them would hold every row, and the audit log, until the last is done, and one refusal would undo the rest; so
rows that cannot be changed are told and the others are changed. All entries carry the id of the one request.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol

from django import forms
from django.contrib.auth.models import AnonymousUser, User
from django.core.exceptions import ValidationError
from django.db import transaction
from django.http import QueryDict

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.tenants.access import may
from controlplane.tenants.actions import Stale

ROWS_MAX = 200
REHEARSAL_REASON = "rehearsal"
READY, APPLIED, NOTHING, REFUSED, CHANGED = "ready", "applied", "nothing", "refused", "changed"
CHIPS = {
    READY: ("plain", "Will change"),
    APPLIED: ("ok", "Changed"),
    NOTHING: ("neutral", "As it is"),
    REFUSED: ("bad", "Refused"),
    CHANGED: ("risk", "Not changed"),
}


class Act(Protocol):
    def __call__(
        self, row: Any, *, version: int, values: Mapping[str, Any], reason: str, actor: Actor, now: datetime
    ) -> Any:
        """Runs the action on one row and answers the row as it is then. Raises Stale and ValidationError."""


def _as_they_come(rows: Sequence[Any]) -> list[Any]:
    return list(rows)


def _no_impact(rows: Sequence[Any]) -> Mapping[int, str]:
    return {}


def _no_excuse(row: Any, ready: Collection[int]) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class BulkAction:
    """What a list offers to do. `shown` is the one value that changes, as people read it.

    `order` sorts rows that depend on each other; `excuse` says why a row that is refused alone will do after those
    that are ready; `impact` tells by row id what else happens.
    """

    name: str
    label: str
    verb: str
    permission: str
    field: str
    shown: Callable[[Any], str]
    act: Act
    acts: str
    form: type[forms.Form] | None = None
    danger: bool = False
    order: Callable[[Sequence[Any]], list[Any]] = _as_they_come
    impact: Callable[[Sequence[Any]], Mapping[int, str]] = _no_impact
    excuse: Callable[[Any, Collection[int]], str] = _no_excuse


@dataclass(frozen=True, kw_only=True)
class Noun:
    """A list whose rows can be selected. `rows` reads those of the ids that the person may see, in the list's order."""

    name: str
    plural: str
    title: str
    list_name: str
    address: str
    rows: Callable[[User | AnonymousUser, Sequence[int]], list[Any]]
    named: Callable[[Any], str]
    audited_as: Callable[[Any], str]
    actions: tuple[BulkAction, ...]

    def offered(self, user: User | AnonymousUser) -> list[BulkAction]:
        return [action for action in self.actions if may(user, action.permission)]

    def action(self, name: str) -> BulkAction | None:
        return next((action for action in self.actions if action.name == name), None)


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that were ticked: id -> the version that the person saw."""

    versions: dict[int, int] = field(default_factory=dict)
    too_many: bool = False


def selection_of(data: QueryDict) -> Selection:
    """`row=ID:VERSION` for each box, or with `all` every one of `shown`; what cannot be read is left out."""
    given = data.get("shown", "").split(",") if "all" in data else data.getlist("row")
    versions = {}
    for one in given[: ROWS_MAX + 1]:
        pk, _, version = one.partition(":")
        if pk.isdecimal() and version.isdecimal() and len(pk) < 10 and len(version) < 10:
            versions[int(pk)] = int(version)
    return Selection(versions, too_many=len(given) > ROWS_MAX)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row before or after the action. `entry` is what somebody else did since the person looked."""

    row: Any
    name: str
    version: int
    before: str
    after: str
    state: str
    why: str = ""
    impact: str = ""
    entry: AuditEntry | None = None

    @property
    def chip(self) -> tuple[str, str]:
        return CHIPS[self.state]

    @property
    def key(self) -> str:
        """What a box of this row sends."""
        return f"{self.row.pk}:{self.version}"


def rehearse(
    noun: Noun, action: BulkAction, rows: Sequence[Any], selection: Selection, values: Mapping[str, Any],
    *, actor: Actor, now: datetime,
) -> list[Outcome]:  # fmt: skip
    """What the action would do to each row: it is run and rolled back, so that every rule of it is told beforehand.

    Rows are judged as they are now; one that changed since it was listed says so, and its review is of what it is.
    """
    ready: set[int] = set()
    found = []
    ordered = action.order(rows)
    impact = action.impact(ordered)
    for row in ordered:
        outcome = _attempt(
            noun, action, row, row.version, values, reason=REHEARSAL_REASON, actor=actor, now=now, keep=False,
            impact=impact.get(row.pk, ""),
        )  # fmt: skip
        if outcome.state == REFUSED and (excuse := action.excuse(row, ready)):
            outcome = replace(outcome, state=READY, why=excuse)
        if outcome.state == READY:
            ready.add(row.pk)
        if selection.versions[row.pk] != row.version:
            outcome = replace(outcome, entry=_last_entry(noun, row))
        found.append(outcome)
    return found


def apply(
    noun: Noun, action: BulkAction, rows: Sequence[Any], selection: Selection, values: Mapping[str, Any],
    *, reason: str, actor: Actor, now: datetime,
) -> list[Outcome]:  # fmt: skip
    """Does it, row by row. A row that changed since its review is left alone and says what somebody else did."""
    found = []
    for row in action.order(rows):
        outcome = _attempt(
            noun, action, row, selection.versions[row.pk], values, reason=reason, actor=actor, now=now, keep=True
        )
        found.append(replace(outcome, entry=_last_entry(noun, row)) if outcome.state == CHANGED else outcome)
    return found


def _attempt(
    noun: Noun, action: BulkAction, row: Any, version: int, values: Mapping[str, Any], *, reason: str, actor: Actor,
    now: datetime, keep: bool, impact: str = "",
) -> Outcome:  # fmt: skip
    before = action.shown(row)
    after, state, why = before, APPLIED if keep else READY, ""
    try:
        with transaction.atomic():
            done = action.act(row, version=version, values=values, reason=reason, actor=actor, now=now)
            after = action.shown(done)
            if not keep:
                transaction.set_rollback(True)
    except Stale as error:
        after, state, version = action.shown(error.current), CHANGED, getattr(error.current, "version", version)
    except ValidationError as error:
        state, why = REFUSED, " ".join(error.messages)
    except type(row).DoesNotExist:
        state, why = REFUSED, "It is no longer there."
    if state in (READY, APPLIED) and after == before:
        state, impact = NOTHING, ""
    return Outcome(row, noun.named(row), version, before, after, state, why, impact)


def _last_entry(noun: Noun, row: Any) -> AuditEntry | None:
    return AuditEntry.objects.filter(noun=noun.name, object_id=noun.audited_as(row)).order_by("-id").first()
