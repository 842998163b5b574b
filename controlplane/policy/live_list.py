"""The live list: keys, suspensions and freezes as signed entries with a number that only grows.

Rows carry the number of their last change; whoever gives a number holds the installation's row until it commits. The
signer takes the same row, so that nobody is in between a number and its commit while it reads: no entry is skipped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Max, Model, QuerySet

from controlplane.contracts.models import WorkloadClass
from controlplane.core.generations import same_live_list
from controlplane.fleet.models import Pool
from controlplane.policy.models import LiveEntry, SigningKey
from controlplane.policy.signing import Signer, signer
from controlplane.tenants.actions import next_live_number
from controlplane.tenants.models import ApiKey, Installation, Tenant
from controlplane.wire.policy import LiveBody, LiveClass, LiveFreeze, LiveKey, LiveTenant, live_message
from controlplane.wire.report import LiveDelta, LiveItem
from controlplane.wire.signing import canonical, digest_hex, to_text

BATCH = 2_000
DELTA_LIMIT = 500
# More than that at once is no emergency: a broadcast stays small, and reports bring the list.
URGENT_MOST = 16
# A freeze without an end: the end of the year 9999.
FOREVER_US = 253_402_300_799_000_000


@dataclass(frozen=True)
class Kind:
    """One kind of subject: its rows, which of them an agent must hear of at first, and its body."""

    name: str
    rows: Callable[[], QuerySet[Any]]
    first: Callable[[], QuerySet[Any]]
    body: Callable[[Any], LiveBody]


def sign_changes(now: datetime) -> int:
    """Signs every change that has no entry yet; returns how many. Several signers at once do the work once."""
    total = 0
    while signed := _sign_batch(now):
        total += signed
    return total


def newest() -> int:
    """The number of the latest signed entry; 0 when there is none."""
    return LiveEntry.objects.aggregate(number=Max("number"))["number"] or 0


def delta(since: int, limit: int = DELTA_LIMIT) -> LiveDelta | None:
    """What an agent that has the list up to `since` lacks, oldest first; None when it lacks nothing.

    `full` tells it to forget what it has first: it has nothing, or a list of before the control plane was restored,
    with numbers of an earlier generation or ahead of all that there are.
    An agent takes one delta at a time and comes back with `through`, so a long list arrives in several answers.
    """
    last = newest()
    if since == last:
        return None
    full = not same_live_list(since, last)
    start = 0 if full else since
    rows = LiveEntry.objects.filter(number__gt=start).order_by("number")[:limit]
    entries = [_item(row) for row in rows]
    through = entries[-1].number if len(entries) == limit else last
    return LiveDelta(since=start, through=through, full=full, entries=entries)


def urgent(since: int) -> list[LiveItem]:
    """Entries after `since` that a broadcast may carry, oldest first; none where there are more than a few.

    Of keys only those that are revoked: whoever listens at the broker learns the hash of no key that is good.
    """
    rows = list(LiveEntry.objects.filter(number__gt=since).order_by("number")[: URGENT_MOST + 1])
    if len(rows) > URGENT_MOST:
        return []
    keys = [row.subject for row in rows if row.kind == "key"]
    good = ApiKey.objects.filter(pk__in=keys).exclude(state=ApiKey.State.REVOKED) if keys else ApiKey.objects.none()
    kept_back = {str(pk) for pk in good.values_list("pk", flat=True)}
    return [_item(row) for row in rows if row.kind != "key" or row.subject not in kept_back]


def sign_again(now: datetime) -> int:
    """Signs entries whose key was revoked with its successor; the bodies stay."""
    revoked = SigningKey.objects.filter(use=SigningKey.Use.LIVE, revoked_at__isnull=False).values("kid")
    if not LiveEntry.objects.filter(kid__in=revoked).exists():
        return 0
    with transaction.atomic():
        _hold_numbers()
        key = signer(SigningKey.Use.LIVE, now)
        rows = list(LiveEntry.objects.exclude(kid=key.kid).order_by("number")[:BATCH])
        installation_id = str(Installation.objects.get(pk=1).uuid)
        for row in rows:
            row.kid = key.kid
            row.signature = _signature(key, installation_id, row.number, bytes(row.body))
        LiveEntry.objects.bulk_update(rows, ["kid", "signature"])
    return len(rows)


def _sign_batch(now: datetime) -> int:
    with transaction.atomic():
        installation = _hold_numbers()
        if installation is None:
            return 0
        _number_what_has_none()
        changed = _changed(newest())
        if not changed:
            return 0
        _part_shared_numbers(changed)
        changed.sort(key=lambda item: item[1].live_number)
        key = signer(SigningKey.Use.LIVE, now)
        entries = [_entry(kind, row, key, str(installation.uuid), now) for kind, row in changed[:BATCH]]
        # A later entry about the same subject replaces the earlier one, so the list stays as long as its subjects.
        for kind in KINDS:
            subjects = [entry.subject for entry in entries if entry.kind == kind.name]
            LiveEntry.objects.filter(kind=kind.name, subject__in=subjects).delete()
        LiveEntry.objects.bulk_create(entries)
        return len(entries)


def _hold_numbers() -> Installation | None:
    return Installation.objects.select_for_update().filter(pk=1).first()


def _number_what_has_none() -> None:
    """Rows that were written without a number (an import) and that agents must hear of get one."""
    for kind in KINDS:
        for row in kind.first().filter(live_number=0).order_by("pk"):
            row.live_number = next_live_number()
            row.save(update_fields=["live_number"])


def _changed(last: int) -> list[tuple[Kind, Any]]:
    return [(kind, row) for kind in KINDS for row in kind.rows().filter(live_number__gt=last).order_by("pk")]


def _part_shared_numbers(changed: list[tuple[Kind, Any]]) -> None:
    """One change may have given its number to several rows; an entry needs one of its own, so the others get a new.

    This happens before the batch is cut: a row left for the next batch never has a number that was already signed.
    """
    taken: set[int] = set()
    for _, row in changed:
        if row.live_number in taken:
            row.live_number = next_live_number()
            row.save(update_fields=["live_number"])
        taken.add(row.live_number)


def _entry(kind: Kind, row: Model, key: Signer, installation_id: str, now: datetime) -> LiveEntry:
    body = canonical(kind.body(row))
    number = row.live_number  # type: ignore[attr-defined]
    return LiveEntry(
        number=number,
        kind=kind.name,
        subject=str(row.pk),
        body=body,
        kid=key.kid,
        signature=_signature(key, installation_id, number, body),
        signed_at=now,
    )


def _signature(key: Signer, installation_id: str, number: int, body: bytes) -> bytes:
    return key.sign(live_message(installation=installation_id, number=number, digest=digest_hex(body)))


def _item(row: LiveEntry) -> LiveItem:
    return LiveItem(
        number=row.number, body=to_text(bytes(row.body)), kid=row.kid, signature=to_text(bytes(row.signature))
    )


def _us(at: datetime | None) -> int | None:
    return None if at is None else round(at.timestamp() * 1_000_000)


def key_body(row: ApiKey) -> LiveKey:
    hashes = [row.secret_hash] + ([row.previous_hash] if row.previous_hash else [])
    return LiveKey(
        number=row.live_number,
        id=row.id,
        public_id=row.public_id,
        tenant_id=row.tenant_id,
        state=row.state,
        hashes=hashes,
        previous_until_us=_us(row.previous_valid_until) if row.previous_hash else None,
        expires_us=_us(row.expires_at),
        classes=list(row.classes),
        default_class=row.default_class,
        max_concurrency=row.max_concurrency,
        requests_per_s=row.requests_per_s,
        tokens_per_minute=row.tokens_per_minute,
    )


def tenant_body(row: Tenant) -> LiveTenant:
    return LiveTenant(number=row.live_number, id=row.id, slug=row.slug, state=row.state)


def class_body(row: WorkloadClass) -> LiveClass:
    return LiveClass(number=row.live_number, id=row.id, slug=row.slug, state=row.state)


def _freeze_body(row: Pool) -> LiveFreeze:
    until = None
    if row.frozen_since is not None:
        until = _us(row.frozen_until) if row.frozen_until is not None else FOREVER_US
    return LiveFreeze(number=row.live_number, pool_id=row.id, frozen_until_us=until)


KINDS = (
    Kind("key", lambda: ApiKey.objects.all(), lambda: ApiKey.objects.all(), key_body),
    Kind(
        "tenant",
        lambda: Tenant.objects.all(),
        lambda: Tenant.objects.exclude(state=Tenant.State.ACTIVE),
        tenant_body,
    ),
    Kind(
        "class",
        lambda: WorkloadClass.objects.all(),
        lambda: WorkloadClass.objects.exclude(state=WorkloadClass.State.ACTIVE),
        class_body,
    ),
    Kind(
        "freeze",
        lambda: Pool.objects.all(),
        lambda: Pool.objects.exclude(frozen_since__isnull=True),
        _freeze_body,
    ),
)
