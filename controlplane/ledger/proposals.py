"""Postings by hand: one person makes a proposal, another one checks it; only then the book gets an event.

An event is known by the proposal's key, so that approving twice posts once.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.core.money import format_nanos
from controlplane.core.period import Window, day_windows, load_zone, parse_period
from controlplane.ledger.bridging import bridge_report
from controlplane.ledger.models import LedgerEvent, Proposal
from controlplane.ledger.posting import (
    AccountKind,
    AccountRef,
    PostingLine,
    Source,
    account_ref,
    hold_posting,
    owner_account,
    post,
)
from controlplane.ledger.variances import (
    KIND,
    SPREADS,
    booked_variances,
    left_to_book,
    source_of,
    variance_lines,
)
from controlplane.tenants.models import Installation, Tenant

AMOUNT_MOST_NANOS = 10**18
ADJUSTMENT = "adjustment"
AN_INSTANT = timedelta(microseconds=1)


def billed_account(tenant: str, class_: str) -> AccountRef:
    """What a tenant was billed in a class."""
    return AccountRef(AccountKind.BILLED, tenant=tenant, class_=class_)


def revenue_account(class_: str) -> AccountRef:
    """The other side of what tenants were billed."""
    return AccountRef(AccountKind.REVENUE, class_=class_)


def propose_variance(*, period: str, step: str, spread: str, actor: Actor, now: datetime, reason: str) -> Proposal:
    """Proposes to book what a step of the bridge still has beyond the book, spread or left on the platform.

    Raises ValidationError for a step without a rest, or one that is proposed already.
    """
    reason = checked_reason(reason)
    window, zone = _month(period)
    if spread not in SPREADS:
        raise ValidationError({"spread": f"Choose one of {', '.join(SPREADS)}."})
    with transaction.atomic():
        report = bridge_report(period, window, zone)
        nanos = left_to_book(report, booked_variances(period), step)
        if not nanos:
            raise ValidationError({"step": "Nothing is left to book of this step."})
        lines = variance_lines(report, day_windows(load_zone(zone), window.start, window.end), step, spread, nanos)
        number = LedgerEvent.objects.filter(source=source_of(period, step)).count() + 1
        return _propose(
            Proposal.Kind.VARIANCE, period, f"{source_of(period, step)}#{number}", nanos, lines, actor, now, reason,
            step=step, spread=spread,
        )  # fmt: skip


def propose_adjustment(
    *, period: str, tenant: str, class_: str, amount_nanos: int, actor: Actor, now: datetime, reason: str
) -> Proposal:
    """Proposes to move cost between a tenant and the platform; a positive amount is borne by the tenant."""
    reason = checked_reason(reason)
    _month(period)
    _check_amount(amount_nanos, signed=True)
    slug = _tenant(tenant)
    line = PostingLine(
        owner_account(slug, class_, ADJUSTMENT), owner_account("platform", class_, ADJUSTMENT), amount_nanos
    )
    return _by_hand(Proposal.Kind.ADJUSTMENT, period, slug, amount_nanos, line, actor, now, reason)


def propose_credit_note(
    *, period: str, tenant: str, class_: str, amount_nanos: int, actor: Actor, now: datetime, reason: str
) -> Proposal:
    """Proposes to give a tenant back a part of what it was billed for a period; the amount is positive."""
    reason = checked_reason(reason)
    _month(period)
    _check_amount(amount_nanos, signed=False)
    slug = _tenant(tenant)
    line = PostingLine(revenue_account(class_), billed_account(slug, class_), amount_nanos)
    return _by_hand(Proposal.Kind.CREDIT_NOTE, period, slug, amount_nanos, line, actor, now, reason)


def _by_hand(
    kind: Proposal.Kind,
    period: str,
    tenant: str,
    nanos: int,
    line: PostingLine,
    actor: Actor,
    now: datetime,
    reason: str,
) -> Proposal:
    with transaction.atomic():
        hold_posting()
        number = Proposal.objects.filter(kind=kind, period=period).count() + 1
        return _propose(
            kind, period, f"{kind}:{period}#{number}", nanos, [line], actor, now, reason, tenant_slug=tenant
        )


def _propose(
    kind: Proposal.Kind,
    period: str,
    key: str,
    nanos: int,
    lines: Iterable[PostingLine],
    actor: Actor,
    now: datetime,
    reason: str,
    **more: Any,
) -> Proposal:
    rows = [{"debit": line.debit.code, "credit": line.credit.code, "nanos": line.amount_nanos} for line in lines]
    try:
        with transaction.atomic():
            row = Proposal.objects.create(
                kind=kind, period=period, event_key=key, amount_nanos=nanos, lines=rows, reason=reason, made_at=now,
                made_by=actor.name, **more,
            )  # fmt: skip
    except IntegrityError:
        raise ValidationError({"step": "This is proposed already. Approve or reject that proposal first."}) from None
    record(
        actor=actor, action=f"{kind}.propose", noun="proposal", object_id=row.pk, now=now,
        tenant_slug=row.tenant_slug,
        after={"period": period, "amount": format_nanos(nanos), "lines": len(rows), **more}, reason=reason,
    )  # fmt: skip
    return row


def approve(proposal_id: int, *, actor: Actor, now: datetime, reason: str) -> Proposal:
    """Posts a proposal that somebody else made; in a closed month it becomes an adjustment of the open one.

    Approving again changes nothing. Raises ValidationError for the maker, for a rejected one, and for a variance that
    has changed since it was proposed.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        row = _decidable(proposal_id, actor)
        if row.state == Proposal.State.POSTED:
            return row
        if row.kind == Proposal.Kind.VARIANCE:
            _check_still_so(row)
        window, _ = _month(row.period)
        lines = [PostingLine(account_ref(one["debit"]), account_ref(one["credit"]), one["nanos"]) for one in row.lines]
        source = source_of(row.period, row.step) if row.kind == Proposal.Kind.VARIANCE else f"{row.kind}:{row.period}"
        row.event = post(
            row.event_key, KIND if row.kind == Proposal.Kind.VARIANCE else row.kind, lines,
            at=min(window.end - AN_INSTANT, now), now=now, created_by=actor.name, source=Source(source),
            reason=row.reason,
        )  # fmt: skip
        _decide(row, Proposal.State.POSTED, actor, now, reason)
    return row


def reject(proposal_id: int, *, actor: Actor, now: datetime, reason: str) -> Proposal:
    """Ends a proposal without a posting; its maker may take it back so. Again changes nothing."""
    reason = checked_reason(reason)
    with transaction.atomic():
        row = Proposal.objects.select_for_update().get(pk=proposal_id)
        if row.state == Proposal.State.POSTED:
            raise ValidationError("This is posted. Propose the opposite instead.")
        if row.state == Proposal.State.PROPOSED:
            withdrawn = row.made_by == actor.name
            _decide(row, Proposal.State.REJECTED, actor, now, reason, decided_by="" if withdrawn else actor.name)
    return row


def _decidable(proposal_id: int, actor: Actor) -> Proposal:
    row = Proposal.objects.select_for_update().get(pk=proposal_id)
    if row.state == Proposal.State.REJECTED:
        raise ValidationError("This was rejected. Propose it again.")
    if row.state == Proposal.State.PROPOSED and row.made_by == actor.name:
        raise ValidationError("You made this proposal: somebody else has to approve it.")
    return row


def _check_still_so(row: Proposal) -> None:
    window, zone = _month(row.period)
    left = left_to_book(bridge_report(row.period, window, zone), booked_variances(row.period), row.step)
    if left != row.amount_nanos:
        raise ValidationError(
            f"The bridge says {format_nanos(left)} now, the proposal {format_nanos(row.amount_nanos)}. Reject it and"
            " propose the present amount."
        )


def _decide(
    row: Proposal, state: Proposal.State, actor: Actor, now: datetime, reason: str, decided_by: str | None = None
) -> None:
    row.state, row.decided_at, row.decision_reason = state, now, reason
    row.decided_by = actor.name if decided_by is None else decided_by
    row.save(update_fields=["state", "decided_at", "decided_by", "decision_reason", "event"])
    record(
        actor=actor, action=f"{row.kind}.{'approve' if state == Proposal.State.POSTED else 'reject'}", noun="proposal",
        object_id=row.pk, now=now, tenant_slug=row.tenant_slug, before={"state": "proposed"},
        after={"state": str(state), "event": row.event.key if row.event else None}, reason=reason,
    )  # fmt: skip


def _month(period: str) -> tuple[Window, str]:
    zone = Installation.objects.values_list("billing_zone", flat=True).get(pk=1)
    try:
        window = parse_period(load_zone(zone), period)
    except ValueError as error:
        raise ValidationError({"period": f"{error}."}) from None
    if len(window.label) != len("2026-10"):
        raise ValidationError({"period": "Choose a month, such as 2026-10."})
    return window, zone


def _tenant(slug: str) -> str:
    if not Tenant.objects.filter(slug=slug).exists():
        raise ValidationError({"tenant": f"There is no tenant {slug[:63]!r}. Choose one of the list."})
    return slug


def _check_amount(nanos: int, *, signed: bool) -> None:
    if not nanos or abs(nanos) > AMOUNT_MOST_NANOS or (nanos < 0 and not signed):
        raise ValidationError(
            {"amount": f"Enter an amount {'other than 0' if signed else 'over 0'}, at most 1,000,000,000."}
        )
