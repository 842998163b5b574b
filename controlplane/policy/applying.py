"""The whole configuration as one YAML file: written out, planned against what is there, and applied in one transaction.

Every step goes through the action that a page would call, so rules, versions and the audit log are the same. Nothing
reaches agents by this: what was applied is reviewed and pushed like any other change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, time
from textwrap import indent
from typing import Any

import yaml
from django.core.exceptions import ObjectDoesNotExist, PermissionDenied, ValidationError
from django.db import connection, transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.budgets.actions import archive_budget, create_budget, edit_budget
from controlplane.budgets.models import Budget
from controlplane.contracts import actions as contracts
from controlplane.contracts.models import WorkloadClass
from controlplane.fleet import actions as fleet
from controlplane.fleet.models import Slot
from controlplane.ledger.rates import add_cost_rate, add_rate_card
from controlplane.policy.apply_plan import Mode, Plan, Step, Verb, plan
from controlplane.policy.configuration import read_instant
from controlplane.policy.sections import BY_NAME, FORM, SECTIONS, Item, read_sections
from controlplane.policy.yaml_lines import Problem, Unreadable, read_lines
from controlplane.tenants.actions import Stale, archive_tenant, create_tenant, edit_tenant
from controlplane.tenants.models import Tenant
from controlplane.wire.signing import canonical, digest_hex

# Any fixed number: files are applied one after the other.
APPLY_LOCK = 0x666C6170
CLOCKS = ("admitted_before", "finished_by")


_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_INDENT = " " * 6
ITEMS_A_PIECE = 100


def export_text(now: datetime) -> str:
    """Everything in use as a file that `apply` reads; an empty section says `clear`, prices never do."""
    return "".join(export_pieces(now))


def export_pieces(now: datetime) -> Iterator[str]:
    """The same in pieces. All of it is read before the first, so that a slow download holds no mixture of instants and
    no transaction; writing YAML is what takes long, and is done as it goes.
    """
    return _pieces(read_sections(now))


def _pieces(sections: dict[str, list[Item]]) -> Iterator[str]:
    yield (
        "# The configuration of an installation. Change it and give it to `manage.py policy apply`: it shows a plan.\n"
        "# mode: replace = exactly these items; clear = none; unmanaged = leave as they are. No secrets are in here.\n"
        f"flexband: {FORM}\nsections:\n"
    )
    for name, items in sections.items():
        empty = Mode.CLEAR if BY_NAME[name].may_clear else Mode.UNMANAGED
        yield f"  {name}:\n    mode: {Mode.REPLACE if items else empty}\n" + ("    items:\n" if items else "")
        for begin in range(0, len(items), ITEMS_A_PIECE):
            part = items[begin : begin + ITEMS_A_PIECE]
            # The writer in C puts a list as far left as its name; people indent the items of a section.
            text = yaml.dump(part, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120 - len(_INDENT))
            yield indent(text, _INDENT)


@dataclass(frozen=True)
class Prepared:
    """A plan, and the digest of what it was made against: applied only while that is still so."""

    plan: Plan
    against: str


def prepare(text: str | bytes, now: datetime) -> Prepared:
    """The plan of a file, rehearsed: every rule of every step was asked. Raises Unreadable with line numbers."""
    with transaction.atomic():
        found = _prepared(text, now)
        try:
            with transaction.atomic():
                _run(found.plan, Actor.system("rehearsal"), now, "rehearsal")
                raise _Rehearsed
        except _Rehearsed:
            pass
    return found


def apply(
    text: str | bytes, *, actor: Actor, now: datetime, reason: str, against: str | None = None,
    may: Callable[[str], bool] = lambda permission: True,
) -> Plan:  # fmt: skip
    """Does what the file says, all or nothing. Twice is once.

    `against` is the digest that a person saw the plan against. Raises Unreadable with line numbers, ValidationError
    without a reason or when somebody changed something since, PermissionDenied where `may` says that whoever asks
    could not take one of the steps on its own page.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [APPLY_LOCK])
        found = _prepared(text, now)
        if against is not None and against != found.against:
            raise ValidationError({"file": "Somebody changed something since the plan was made. Look at it again."})
        if beyond := sorted({NEEDS[step.section] for step in found.plan.steps if not may(NEEDS[step.section])}):
            raise PermissionDenied(f"The file changes what you may not: it takes {', '.join(beyond)}.")
        if not found.plan.empty:
            _run(found.plan, actor, now, reason)
            raw = text.encode() if isinstance(text, str) else text
            record(
                actor=actor,
                action="configuration.apply",
                noun="configuration",
                object_id=digest_hex(raw)[:16],
                now=now,
                after={
                    "file_digest": digest_hex(raw),
                    "modes": {name: str(mode) for name, mode in found.plan.modes.items()},
                    "steps": len(found.plan.steps),
                    **found.plan.counts,
                },
                reason=reason,
            )
    return found.plan


class _Rehearsed(Exception):
    """Takes back what a rehearsal wrote."""


def _prepared(text: str | bytes, now: datetime) -> Prepared:
    present = read_sections(now)
    return Prepared(plan(read_lines(text), present), digest_hex(canonical(present)))


def _run(steps: Plan, actor: Actor, now: datetime, reason: str) -> None:
    problems: list[Problem] = []
    for step in steps.steps:
        try:
            # A refusal undoes its step alone, so that one look finds every line.
            with transaction.atomic():
                DOERS[step.section](step, _Call(actor, now, reason))
        except ValidationError as error:
            problems += _problems(step, error)
        except Stale:
            problems.append(Problem(step.line, f"{step.subject} was changed at the same moment: try again."))
        except ObjectDoesNotExist:
            problems.append(Problem(step.line, f"{step.subject} or what it names does not exist."))
    if problems:
        raise Unreadable(sorted(problems, key=lambda problem: problem.line))


def _problems(step: Step, error: ValidationError) -> list[Problem]:
    if not hasattr(error, "error_dict"):
        return [Problem(step.line, f"{step.sentence}: {message}") for message in error.messages]
    return [
        Problem(step.field_lines.get(name.removesuffix("_id"), step.line), f"{step.subject}: {name}: {message}")
        for name, messages in error.message_dict.items()
        for message in messages
    ]


@dataclass(frozen=True)
class _Call:
    """What every action is called with."""

    actor: Actor
    now: datetime
    reason: str

    @property
    def named(self) -> dict[str, Any]:
        return {"actor": self.actor, "now": self.now, "reason": self.reason}


def _starts(step: Step) -> datetime | None:
    return read_instant(step.child) if step.child else None


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _class(step: Step, call: _Call) -> None:
    [slug] = step.key
    values = _without(step.values, "slug", "kind")
    if "downgrade_to" in values and values["downgrade_to"] is not None:
        target = WorkloadClass.objects.filter(slug=values["downgrade_to"]).exclude(state="archived").first()
        if target is None:
            raise ValidationError({"downgrade_to": f"There is no class {values['downgrade_to']}."})
        values["downgrade_to"] = target
    if step.verb is Verb.CREATE:
        contracts.create_class(slug=slug, kind=step.values["kind"], values=values, **call.named)
    elif step.verb is Verb.EDIT:
        contracts.edit_class(slug=slug, values=values, **call.named)
    else:
        contracts.archive_class(slug=slug, **call.named)


def _tenant(step: Step, call: _Call) -> None:
    [slug] = step.key
    values = _without(step.values, "slug", "name", "parent")
    if "parent" in step.values:
        values["parent_id"] = _tenant_id(step.values["parent"], "parent_id")
    if step.verb is Verb.CREATE:
        create_tenant(slug=slug, name=step.values.get("name") or slug, **values, **call.named)
        return
    row = Tenant.objects.get(slug=slug)
    if step.verb is Verb.EDIT:
        changed = values | ({"name": step.values["name"]} if "name" in step.values else {})
        edit_tenant(tenant_id=row.pk, version=row.version, changes=changed, **call.named)
    else:
        archive_tenant(tenant_id=row.pk, version=row.version, **call.named)


def _tenant_id(slug: str | None, field: str) -> int | None:
    if slug is None:
        return None
    found = Tenant.objects.filter(slug=slug).exclude(state=Tenant.State.ARCHIVED).values_list("pk", flat=True).first()
    if found is None:
        raise ValidationError({field: f"There is no tenant {slug}."})
    return found


def _pool(step: Step, call: _Call) -> None:
    [slug] = step.key
    if step.child:
        _slot(step, call)
    elif step.verb is Verb.CREATE:
        values = _without(step.values, "slug", "model")
        fleet.create_pool(slug=slug, model=step.values["model"], values=values, **call.named)
    elif step.verb is Verb.EDIT:
        fleet.edit_pool(slug=slug, values=step.values, **call.named)
    else:
        fleet.archive_pool(slug=slug, **call.named)


def _slot(step: Step, call: _Call) -> None:
    [slug] = step.key
    values = _without(step.values, "name")
    if step.verb is Verb.ADD:
        fleet.add_slots(pool_slug=slug, names=[step.child], **values, **call.named)
        return
    row = Slot.objects.get(pool__slug=slug, name=step.child, removed_at=None)
    if step.verb is Verb.EDIT:
        fleet.edit_slot(slot_id=row.pk, values=values, **call.named)
    else:
        fleet.remove_slot(slot_id=row.pk, **call.named)


def _contract(step: Step, call: _Call) -> None:
    [slug] = step.key
    values = _without(step.values, "slug", "name", "class", "tenant")
    for name in CLOCKS:
        if values.get(name) is not None:
            values[name] = time.fromisoformat(values[name])
    if step.verb is Verb.CREATE:
        contracts.create_contract(
            slug=slug,
            name=step.values.get("name") or slug,
            class_slug=step.values["class"],
            tenant_slug=step.values.get("tenant") or "",
            values=values,
            effective_from=_starts(step),
            **call.named,
        )
    elif step.verb is Verb.ADD:
        contracts.add_version(slug=slug, values=values, effective_from=_starts(step), **call.named)
    else:
        contracts.archive_contract(slug=slug, **call.named)


def _rate_card(step: Step, call: _Call) -> None:
    class_slug, model = step.key
    values = _without(step.values, "class", "model")
    add_rate_card(class_slug=class_slug, model=model, values=values, effective_from=_starts(step), **call.named)


def _cost_rate(step: Step, call: _Call) -> None:
    [pool] = step.key
    nanos = step.values.get("nanos_per_slot_hour")
    if nanos is None:
        raise ValidationError({"nanos_per_slot_hour": "Enter a price; 0 is allowed."})
    add_cost_rate(pool_slug=pool, nanos_per_slot_hour=nanos, effective_from=_starts(step), **call.named)


def _budget(step: Step, call: _Call) -> None:
    tenant, name = step.key
    values = _without(step.values, "tenant", "name")
    if step.verb is Verb.CREATE:
        tenant_id = _tenant_id(tenant, "tenant")
        assert tenant_id is not None, "a budget's key names its tenant"
        create_budget(tenant_id=tenant_id, name=name, **values, **call.named)
        return
    row = Budget.objects.get(tenant__slug=tenant, name=name, archived_at=None)
    if step.verb is Verb.EDIT:
        edit_budget(budget_id=row.pk, version=row.version, changes=values, **call.named)
    else:
        archive_budget(budget_id=row.pk, version=row.version, **call.named)


DOERS: dict[str, Callable[[Step, _Call], None]] = {
    "classes": _class,
    "tenants": _tenant,
    "pools": _pool,
    "contracts": _contract,
    "rate_cards": _rate_card,
    "cost_rates": _cost_rate,
    "budgets": _budget,
}
NEEDS = {
    "classes": "class.write",
    "tenants": "tenant.write",
    "pools": "pool.write",
    "contracts": "contract.write",
    "rate_cards": "rate.write",
    "cost_rates": "rate.write",
    "budgets": "budget.write",
}
"""Section -> the permission that its own pages ask: a file is no way around a token's limits."""
assert DOERS.keys() == NEEDS.keys() == {section.name for section in SECTIONS}
