"""What an import of OpenSLO documents would do, and doing it: all documents that fit, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.contracts.actions import add_version, create_contract
from controlplane.contracts.models import Contract
from controlplane.contracts.openslo import Read


@dataclass(frozen=True)
class Outcome:
    """What becomes of one document: `create`, `version` (the contract exists and differs), `same` or `refused`."""

    read: Read
    does: str
    reasons: list[str]


class Refused(Exception):
    """Some documents do not fit, so nothing was imported; `outcomes` say which."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__("Some documents cannot be imported.")
        self.outcomes = outcomes


class _Rehearsal(Exception):
    pass


def rehearse(found: Sequence[Read], *, actor: Actor, now: datetime) -> list[Outcome]:
    """What `take` would do, tried out and taken back."""
    outcomes: list[Outcome] = []
    try:
        with transaction.atomic():
            outcomes = [_take_one(one, actor, now, "rehearsal") for one in found]
            raise _Rehearsal
    except _Rehearsal:
        return outcomes


def take(found: Sequence[Read], *, actor: Actor, now: datetime, reason: str) -> list[Outcome]:
    """Imports every document, or none. Raises Refused, ValidationError without a reason."""
    reason = checked_reason(reason)
    with transaction.atomic():
        outcomes = [_take_one(one, actor, now, reason) for one in found]
        if any(one.does == "refused" for one in outcomes):
            raise Refused(outcomes)
    return outcomes


def _take_one(one: Read, actor: Actor, now: datetime, reason: str) -> Outcome:
    if one.problems:
        return Outcome(one, "refused", list(one.problems))
    try:
        with transaction.atomic():
            return Outcome(one, _write(one, actor, now, reason), [])
    except ValidationError as error:
        named = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
        texts = [f"{name}: {text}".removeprefix(": ") for name, rows in named.items() for text in rows]
        return Outcome(one, "refused", texts)


def _write(one: Read, actor: Actor, now: datetime, reason: str) -> str:
    contract = Contract.objects.select_related("workload_class", "tenant").filter(slug=one.slug).first()
    if contract is None:
        create_contract(
            slug=one.slug, name=one.name, class_slug=one.class_slug, tenant_slug=one.tenant_slug, values=one.values,
            actor=actor, now=now, reason=reason,
        )  # fmt: skip
        return "create"
    owner = contract.tenant.slug if contract.tenant else ""
    if (contract.workload_class.slug, owner) != (one.class_slug, one.tenant_slug):
        raise ValidationError(
            f"A contract of this name exists for class {contract.workload_class.slug}"
            + (f" and tenant {owner}" if owner else "")
            + ": choose another name."
        )
    newest = contract.versions.order_by("-number").first()
    if newest is not None and all(getattr(newest, name) == value for name, value in one.values.items()):
        return "same"
    add_version(slug=one.slug, values=one.values, actor=actor, now=now, reason=reason)
    return "version"
