"""Closing a month: checked, snapshotted, shut for postings; reopened with a reason, closed again as a new version.

While a month is closed nothing is posted to it: what belongs to it and comes later is an adjustment of the open month.
Each closing keeps the bytes of its exports and its statements, so they are the same for ever.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Max

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.core.money import format_nanos
from controlplane.core.period import Window
from controlplane.ledger.charging import LATE, SYSTEM, post_charges
from controlplane.ledger.closing_checks import Checklist, checklist
from controlplane.ledger.export_files import FORMATS, build
from controlplane.ledger.export_rows import ExportRow, export_rows
from controlplane.ledger.focus_export import FocusFacts
from controlplane.ledger.models import (
    AttributionInterval,
    Period,
    PeriodExport,
    PeriodVersion,
    StatementIssue,
)
from controlplane.ledger.period_queries import had_begun
from controlplane.ledger.posting import AccountKind, hold_posting, trial_balance
from controlplane.ledger.reconciliation import month_window
from controlplane.tenants.models import Installation


@dataclass(frozen=True, slots=True)
class Closed:
    """A closing; `repeated`: the month was closed before, and this changed nothing."""

    version: PeriodVersion
    repeated: bool


def _window(period: str) -> tuple[Window, Installation]:
    book = Installation.objects.get(pk=1)
    try:
        return month_window(period, book.billing_zone), book
    except ValueError as error:
        raise ValidationError({"period": f"{error}."}) from None


def close_period(period: str, *, actor: Actor, now: datetime, reason: str = "") -> Closed:
    """Closes a month that has ended. Needs a reason when a check is open; closing a closed month changes nothing.

    Raises ValidationError: on `period` for a month that is none, has not ended or was before the installation, on
    `reason` where one is needed.
    """
    window, book = _window(period)
    with transaction.atomic():
        hold_posting()
        row, _ = Period.objects.get_or_create(name=period)
        row = Period.objects.select_for_update().get(pk=period)
        if row.state == Period.State.CLOSED:
            return Closed(row.versions.get(version=row.version), repeated=True)
        if now < window.end:
            raise ValidationError({"period": f"{period} has not ended in {book.billing_zone}. Close it afterwards."})
        if not had_begun(window):
            raise ValidationError(
                {"period": f"There was nothing of this installation yet in {period}. Close the month it began in."}
            )
        found = checklist(period, now=now)
        if found.open:
            reason = _needed_reason(reason, found)
        post_charges(period, window, now=now, created_by=actor.name)
        version = _snapshot(row, window, book, found, actor, now, reason.strip())
        row.state, row.version = Period.State.CLOSED, version.version
        row.save(update_fields=["state", "version"])
        record(
            actor=actor, action="period.close", noun="period", object_id=period, now=now, before={"state": "open"},
            after={
                "state": "closed", "version": version.version, "cost": format_nanos(version.cost_nanos),
                "charges": format_nanos(version.charge_nanos), "open_checks": [check.name for check in found.open],
                "exports": dict(version.exports.values_list("format", "sha256")),
            },
            reason=reason,
        )  # fmt: skip
    return Closed(version, repeated=False)


def _needed_reason(reason: str, found: Checklist) -> str:
    if not reason.strip():
        names = ", ".join(check.title.lower() for check in found.open)
        raise ValidationError({"reason": f"Say why it is closed with open checks: {names}."})
    return checked_reason(reason)


def reopen_period(period: str, *, actor: Actor, now: datetime, reason: str) -> Period:
    """Opens a closed month again; what was posted elsewhere meanwhile stays there. An open month stays as it is."""
    reason = checked_reason(reason)
    _window(period)
    with transaction.atomic():
        hold_posting()
        row = Period.objects.select_for_update().filter(name=period).first()
        if row is None or not row.version:
            raise ValidationError({"period": f"{period} was never closed."})
        if row.state == Period.State.OPEN:
            return row
        row.state = Period.State.OPEN
        row.save(update_fields=["state"])
        row.versions.filter(version=row.version).update(reopened_at=now, reopened_by=actor.name, reopen_reason=reason)
        record(
            actor=actor, action="period.reopen", noun="period", object_id=period, now=now,
            before={"state": "closed", "version": row.version}, after={"state": "open"}, reason=reason,
        )  # fmt: skip
    return row


def settle_closed(now: datetime) -> list[str]:
    """Late usage of closed months, as long as it may arrive: posts what is missing; returns the keys of last events."""
    zone = Installation.objects.values_list("billing_zone", flat=True).get(pk=1)
    posted = []
    for name in Period.objects.filter(state=Period.State.CLOSED).order_by("-name").values_list("name", flat=True)[:3]:
        window = month_window(name, zone)
        if now < window.end + LATE:
            event = post_charges(name, window, now=now, created_by=SYSTEM)
            if event is not None:
                posted.append(event.key)
    return posted


def _snapshot(
    row: Period, window: Window, book: Installation, found: Checklist, actor: Actor, now: datetime, reason: str
) -> PeriodVersion:
    number = row.version + 1
    facts = FocusFacts(book.name, window, book.billing_zone, number)
    rows = list(export_rows(row.name, window, book.billing_zone, book.currency, closing=True))
    methods = AttributionInterval.objects.filter(starts_at__gte=window.start, starts_at__lt=window.end)
    trial = trial_balance(row.name)
    charged = sum(one.balance_nanos for one in trial.rows if one.kind == AccountKind.BILLED)
    assert _sum(rows, "charge") == charged, "what statements bill is what the book bills"
    version = PeriodVersion.objects.create(
        period=row, version=number, closed_at=now, closed_by=actor.name, reason=reason, checklist=found.to_json(),
        methods=_methods(methods), fingerprint=trial.fingerprint, cost_nanos=_sum(rows, "cost"),
        charge_nanos=_sum(rows, "charge"),
    )  # fmt: skip
    for format in FORMATS:
        made = build(format, rows, facts, row.name)
        PeriodExport.objects.create(
            version=version, format=format, file_name=made.name, rows=made.rows, content=made.content,
            sha256=hashlib.sha256(made.content).hexdigest(),
        )  # fmt: skip
    _issue_statements(version, rows)
    return version


def _methods(intervals: Any) -> list[dict[str, Any]]:
    """How idle was spread, by pool: a month may have several methods when the policy changed inside it."""
    found = intervals.values_list("pool__slug", "method").annotate(until=Max("ends_at")).order_by("pool__slug", "until")
    return [{"pool": pool, "method": method, "until": until.isoformat()} for pool, method, until in found]


def _nanos(row: ExportRow, name: str) -> int:
    value = getattr(row, name)
    return 0 if value is None else int(value.scaleb(9))


def _sum(rows: Sequence[ExportRow], name: str) -> int:
    return sum(_nanos(row, name) for row in rows)


def _issue_statements(version: PeriodVersion, rows: Sequence[ExportRow]) -> None:
    by_tenant: dict[str, list[ExportRow]] = {}
    for row in rows:
        if row.tenant and row.tenant != "platform":
            by_tenant.setdefault(row.tenant, []).append(row)
    # Closings wait for each other, so the next number is free and no number is left out.
    last = dict(StatementIssue.objects.values_list("tenant_slug").annotate(last=Max("number")))
    before = dict(
        StatementIssue.objects.filter(version__period=version.period, version__version=version.version - 1).values_list(
            "tenant_slug", "number"
        )
    )
    StatementIssue.objects.bulk_create(
        StatementIssue(
            version=version, tenant_slug=tenant, number=last.get(tenant, 0) + 1, supersedes=before.get(tenant),
            charge_nanos=_sum(mine, "charge"), cost_nanos=_sum(mine, "cost"), lines=_statement_lines(mine),
        )
        for tenant, mine in sorted(by_tenant.items())
    )  # fmt: skip


def _statement_lines(rows: Sequence[ExportRow]) -> list[dict[str, Any]]:
    return [
        {
            "kind": row.kind, "class": row.class_, "model": row.model, "rate_version": row.rate_version,
            "requests": row.requests, "prompt_tokens": row.prompt_tokens, "cached_tokens": row.cached_tokens,
            "output_tokens": row.output_tokens, "corrects": row.corrects, "charge_nanos": _nanos(row, "charge"),
        }
        for row in rows
        if row.charge is not None
    ]  # fmt: skip


def verify_exports(period: str) -> dict[str, bool]:
    """Whether the kept bytes of every closing still have the digest of the day they were made, by file name."""
    found = PeriodExport.objects.filter(version__period_id=period).order_by("version__version", "format")
    return {row.file_name: hashlib.sha256(bytes(row.content)).hexdigest() == row.sha256 for row in found}
