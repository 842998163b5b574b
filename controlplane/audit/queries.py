"""Reading and checking the audit log."""

from dataclasses import dataclass
from datetime import datetime

from django.db import connection
from django.db.models import (
    BooleanField,
    Case,
    CharField,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
    When,
)
from django.db.models.functions import Cast

from controlplane.audit.chain import GENESIS, chained_hash
from controlplane.audit.models import AuditEntry, CarriedRevision


@dataclass(frozen=True, slots=True)
class ChainCheck:
    """`broken_at` is the id of the first entry whose hash or link does not hold, None when all hold.

    `last_id` and `last_hash` (hex) are the end of what holds: noted elsewhere they show later that nothing was cut off.
    `anchor_found` is whether a noted hash is still in the chain, None when none was asked for.
    """

    entries: int
    broken_at: int | None
    last_id: int = 0
    last_hash: str = ""
    anchor_found: bool | None = None


def verify_chain(anchor: str = "") -> ChainCheck:
    """Walks all entries. `anchor` is the hash (hex) of an entry that was noted before."""
    previous, count, last_id, broken_at = GENESIS, 0, 0, None
    found = False
    for entry in AuditEntry.objects.order_by("id").iterator(chunk_size=2_000):
        if bytes(entry.previous_hash) != previous or bytes(entry.hash) != chained_hash(entry):
            broken_at = entry.pk
            break
        previous, count, last_id = bytes(entry.hash), count + 1, entry.pk
        found = found or previous.hex() == anchor
    return ChainCheck(
        entries=count,
        broken_at=broken_at,
        last_id=last_id,
        last_hash=previous.hex() if count else "",
        anchor_found=found if anchor else None,
    )


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """What a reader looks for; empty fields do not narrow. `until` is exclusive."""

    noun: str = ""
    action: str = ""
    actor: str = ""
    tenant: str = ""
    object_id: str = ""
    request_id: str = ""
    since: datetime | None = None
    until: datetime | None = None
    revision: int | None = None


# What these nouns say goes to agents with a revision; suspensions and the like act at once and are in none.
CARRIED_NOUNS = ("pool", "class", "contract", "tenant", "rate_card")
CARRIED_ACTIONS = ("budget.create", "budget.archive")
AT_ONCE = ("tenant.suspend", "tenant.resume", "class.suspend", "class.resume")
LENDING = "flex."


def _carried() -> Q:
    return (
        (Q(noun__in=CARRIED_NOUNS) | Q(action__in=CARRIED_ACTIONS))
        & ~Q(action__in=AT_ONCE)
        & ~Q(action__startswith=LENDING)
    )


def with_revision(rows: QuerySet[AuditEntry]) -> QuerySet[AuditEntry]:
    """Adds `carried`: whether a revision takes the change to agents; and `went_out`: the one that did, as text, null
    for a change that waits for a push or that no revision carries."""
    first = CarriedRevision.objects.filter(through_id__gte=OuterRef("pk")).order_by("through_id")
    return rows.annotate(
        carried=ExpressionWrapper(_carried(), output_field=BooleanField()),
        went_out=Case(
            When(noun="revision", then=F("object_id")),
            When(carried=True, then=Cast(Subquery(first.values("revision")[:1]), CharField())),
            default=Value(None),
            output_field=CharField(),
        ),
    )


def waits_for_push(entry: AuditEntry) -> bool:
    """Whether an entry of `with_revision` is of policy and in no revision yet."""
    return entry.carried and entry.went_out is None  # type: ignore[attr-defined, no-any-return]


WAITING_MAX = 1_000


def changes_waiting() -> int:
    """How many changes of policy were made since the last one that a revision carried; counted up to WAITING_MAX."""
    carried = CarriedRevision.objects.order_by("-revision").values_list("through_id", flat=True).first() or 0
    return AuditEntry.objects.filter(_carried(), pk__gt=carried)[:WAITING_MAX].count()


def of_revision(number: int) -> Q:
    """The entries that a revision carried, and those about it."""
    own = CarriedRevision.objects.filter(revision=number).values_list("through_id", flat=True).first()
    about = Q(noun="revision", object_id=str(number))
    if own is None:
        return about
    earlier = CarriedRevision.objects.filter(revision__lt=number).order_by("-revision")
    before = earlier.values_list("through_id", flat=True).first() or 0
    return about | (_carried() & Q(pk__gt=before, pk__lte=own))


def entries(wanted: AuditFilter) -> QuerySet[AuditEntry]:
    """The entries that match, unordered."""
    rows = AuditEntry.objects.all()
    exact = {
        "noun": wanted.noun, "action": wanted.action, "tenant_slug": wanted.tenant, "object_id": wanted.object_id,
        "request_id": wanted.request_id,
    }  # fmt: skip
    rows = rows.filter(**{column: value for column, value in exact.items() if value})
    if wanted.actor:
        rows = rows.filter(actor_name__icontains=wanted.actor)
    if wanted.revision is not None:
        rows = rows.filter(of_revision(wanted.revision))
    if wanted.since is not None:
        rows = rows.filter(at__gte=wanted.since)
    if wanted.until is not None:
        rows = rows.filter(at__lt=wanted.until)
    return rows


# From each pair to the next in an index: a log of years has few of them, and DISTINCT would read all of it.
_VOCABULARY = """
WITH RECURSIVE pair AS (
    (SELECT noun, action FROM audit_auditentry ORDER BY noun, action LIMIT 1)
    UNION ALL
    SELECT following.noun, following.action
      FROM pair
     CROSS JOIN LATERAL (
           SELECT noun, action FROM audit_auditentry AS entry
            WHERE (entry.noun, entry.action) > (pair.noun, pair.action)
            ORDER BY noun, action LIMIT 1) AS following)
SELECT noun, action FROM pair
"""


def vocabulary() -> dict[str, list[str]]:
    """The nouns and actions that occur, for the filters."""
    with connection.cursor() as cursor:
        cursor.execute(_VOCABULARY)
        pairs = cursor.fetchall()
    return {"nouns": sorted({noun for noun, _ in pairs}), "actions": sorted({action for _, action in pairs})}
