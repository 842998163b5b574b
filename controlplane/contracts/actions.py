"""What may be done to classes and contracts: lock, load, decide, apply, audit, in one transaction.

Suspending a class acts within seconds by the live list; everything else acts when policy is pushed.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actions import changes, record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.contracts.wording import sentence, unreachable
from controlplane.core.period import load_zone
from controlplane.fleet.models import Pool, Slot
from controlplane.fleet.pool_rules import share_over_floor
from controlplane.fleet.served_classes import ServedClass
from controlplane.fleet.slugs import check_slug
from controlplane.tenants.actions import Stale, next_live_number
from controlplane.tenants.models import Tenant
from controlplane.wakeups.bells import ring

PPM = 1_000_000
WINDOW_LEAST_S, WINDOW_MOST_S = 60, 30 * 86_400
PERIOD_MOST_S = 90 * 86_400

CLASS_FIELDS = (
    "name", "priority", "min_share_ppm", "max_prompt_tokens", "max_output_tokens", "default_output_tokens",
    "template_allowance_tokens", "max_queue", "max_wait_ms", "stage_timeout_s", "overload", "downgrade_to",
    "retry_safe", "cancellable", "default_deadline_s", "model_names",
)  # fmt: skip
VERSION_FIELDS = (
    "objective", "target_ppm", "population", "metric", "threshold_ms", "window_s", "budget_period_s",
    "load_limit_per_s", "min_events", "admitted_before", "finished_by", "first_attempt_within_s", "zone",
)  # fmt: skip


# ---- classes ----


def create_class(
    *, slug: str, kind: str, values: Mapping[str, Any], actor: Actor, now: datetime, reason: str = ""
) -> WorkloadClass:
    """A new class; `kind` is interactive or batch and never changes. `values`: any of CLASS_FIELDS.

    Raises ValidationError by field.
    """
    check_slug(slug)
    with transaction.atomic():
        _lock_downgrades()
        row = WorkloadClass(slug=slug, kind=kind, created_at=now, updated_at=now)
        _assign(row, values, CLASS_FIELDS)
        row.name = row.name or slug
        _check_class(row)
        row.save(force_insert=True)
        _record_class(row, "class.create", None, _class_values(row), actor, now, reason)
    return row


def edit_class(
    *, slug: str, values: Mapping[str, Any], actor: Actor, now: datetime, reason: str, version: int | None = None
) -> WorkloadClass:
    """Changes any of CLASS_FIELDS. Raises ValidationError by field, Stale when `version` is not the present one."""
    reason = checked_reason(reason)
    with transaction.atomic():
        _lock_downgrades()
        row = _locked_class(slug, version)
        before = _class_values(row)
        _assign(row, values, CLASS_FIELDS)
        _check_class(row)
        changed_before, changed_after = changes(before, _class_values(row))
        if not changed_after:
            return row
        row.updated_at, row.version = now, row.version + 1
        row.save(update_fields=[*CLASS_FIELDS, "updated_at", "version"])
        _record_class(row, "class.edit", changed_before, changed_after, actor, now, reason)
    return row


def suspend_class(*, slug: str, actor: Actor, now: datetime, reason: str, version: int | None = None) -> WorkloadClass:
    """Refuses new requests of the class on every agent, within seconds. Twice changes nothing."""
    return _move_class(slug, "suspended", "class.suspend", actor, now, reason, version)


def resume_class(*, slug: str, actor: Actor, now: datetime, reason: str, version: int | None = None) -> WorkloadClass:
    """Takes requests of a suspended class again, within seconds; brings an archived class back to use."""
    return _move_class(slug, "active", "class.resume", actor, now, reason, version)


def archive_class(*, slug: str, actor: Actor, now: datetime, reason: str, version: int | None = None) -> WorkloadClass:
    """Takes a class out of use. Refused while a pool, a contract, a tenant or another class's downgrade needs it."""
    return _move_class(slug, "archived", "class.archive", actor, now, reason, version)


def _move_class(
    slug: str, state: str, action: str, actor: Actor, now: datetime, reason: str, version: int | None
) -> WorkloadClass:
    reason = checked_reason(reason)
    with transaction.atomic():
        row = WorkloadClass.objects.select_for_update().get(slug=slug)
        _check_version(row, version)
        if row.state == state:
            return row
        if state == WorkloadClass.State.ARCHIVED:
            _check_unused(row)
        before = {"state": row.state}
        row.state, row.updated_at, row.version = state, now, row.version + 1
        row.live_number = next_live_number()
        row.save(update_fields=["state", "updated_at", "version", "live_number"])
        _record_class(row, action, before, {"state": state}, actor, now, reason)
        ring("policy.sign_live")
    return row


# ---- contracts ----


def create_contract(
    *,
    slug: str,
    class_slug: str,
    values: Mapping[str, Any],
    actor: Actor,
    now: datetime,
    name: str = "",
    tenant_slug: str = "",
    effective_from: datetime | None = None,
    reason: str = "",
) -> Contract:
    """A contract with its first version. `values`: any of VERSION_FIELDS; without `effective_from` it begins now.

    Raises ValidationError by field.
    """
    check_slug(slug)
    with transaction.atomic():
        contract = Contract(
            slug=slug,
            name=name or slug,
            workload_class=_class_in_use(class_slug),
            tenant=_tenant_in_use(tenant_slug) if tenant_slug else None,
            created_at=now,
        )
        contract.full_clean(validate_constraints=False)
        version = _new_version(contract, 1, values, effective_from or now, actor, now, reason)
        contract.save(force_insert=True)
        version.contract = contract
        version.save(force_insert=True)
        record(
            actor=actor, action="contract.create", noun="contract", object_id=slug, now=now,
            tenant_slug=tenant_slug, after=_contract_values(contract, version), reason=reason,
        )  # fmt: skip
    return contract


def add_version(
    *,
    slug: str,
    values: Mapping[str, Any],
    actor: Actor,
    now: datetime,
    reason: str,
    effective_from: datetime | None = None,
    version: int | None = None,
) -> ContractVersion:
    """The next version of a contract, from an instant on; what is in force stays as it is until then and for ever.

    What `values` leaves out is taken from the newest version. Raises ValidationError by field, Stale when `version`
    is not the contract's present one.
    """
    reason = checked_reason(reason)
    with transaction.atomic():
        contract = _locked_contract(slug, version)
        newest = contract.versions.order_by("-number").first()
        starts = effective_from or now
        if starts < now:
            raise ValidationError(
                {"effective_from": "Choose an instant ahead: what was promised is not changed afterwards."}
            )
        if newest is not None and starts <= newest.effective_from:
            raise ValidationError(
                {
                    "effective_from": f"Version {newest.number} begins at {newest.effective_from:%Y-%m-%d %H:%M} UTC."
                    " Choose a later instant."
                }
            )
        inherited = {name: getattr(newest, name) for name in VERSION_FIELDS} if newest else {}
        number = newest.number + 1 if newest else 1
        row = _new_version(contract, number, {**inherited, **values}, starts, actor, now, reason)
        changed_before, changed_after = changes(inherited, {name: getattr(row, name) for name in VERSION_FIELDS})
        if newest is not None and not changed_after:
            raise ValidationError("Nothing differs from the version before. Change a value or leave it as it is.")
        row.contract = contract
        row.save(force_insert=True)
        Contract.objects.filter(pk=contract.pk).update(version=contract.version + 1)
        record(
            actor=actor, action="contract.version", noun="contract", object_id=slug, now=now,
            tenant_slug=contract.tenant.slug if contract.tenant else "",
            before={"number": newest.number if newest else None, **changed_before},
            after={"number": number, "effective_from": starts, **changed_after}, reason=reason,
        )  # fmt: skip
    return row


def archive_contract(*, slug: str, actor: Actor, now: datetime, reason: str, version: int | None = None) -> Contract:
    """Ends a contract: it is judged no longer once policy is pushed; its history stays."""
    reason = checked_reason(reason)
    with transaction.atomic():
        contract = _locked_contract(slug, version)
        contract.archived_at, contract.version = now, contract.version + 1
        contract.save(update_fields=["archived_at", "version"])
        record(
            actor=actor, action="contract.archive", noun="contract", object_id=slug, now=now,
            tenant_slug=contract.tenant.slug if contract.tenant else "",
            before={"archived_at": None}, after={"archived_at": now}, reason=reason,
        )  # fmt: skip
    return contract


# ---- rules of classes ----


def _check_class(row: WorkloadClass) -> None:
    row.full_clean(validate_constraints=False)
    errors: dict[str, ValidationError] = {}
    if row.min_share_ppm > PPM:
        errors["min_share_ppm"] = ValidationError("Enter a share from 0 to 100 %.", code="out_of_range")
    for field in ("max_prompt_tokens", "max_output_tokens", "stage_timeout_s", "default_deadline_s"):
        if getattr(row, field) < 1:
            errors[field] = ValidationError("Enter 1 or more.", code="out_of_range")
    if row.default_output_tokens > row.max_output_tokens:
        errors["default_output_tokens"] = ValidationError(
            f"The expected output cannot be over the largest one ({row.max_output_tokens:,}).", code="out_of_range"
        )
    if row.overload == WorkloadClass.Overload.DOWNGRADE and row.downgrade_to_id is None:
        errors["downgrade_to"] = ValidationError(
            "Say which class its requests go to, or choose another action.", code="downgrade_missing"
        )
    if message := _downgrade_cycle(row):
        errors["downgrade_to"] = ValidationError(message, code="downgrade_cycle")
    if row.retry_safe and not row.cancellable:
        errors["retry_safe"] = ValidationError(
            "Only what can be cancelled can be sent again: allow cancelling too.", code="retry_needs_cancel"
        )
    if message := _share_does_not_fit(row):
        errors["min_share_ppm"] = ValidationError(message, code="floors_over_slots")
    if errors:
        raise ValidationError(errors)


def _lock_downgrades() -> None:
    """Edits of classes take turns: two at once could close a circle that neither sees."""
    list(WorkloadClass.objects.select_for_update().order_by("pk").values_list("pk"))


def _downgrade_cycle(row: WorkloadClass) -> str:
    targets = dict(WorkloadClass.objects.values_list("pk", "downgrade_to_id"))
    slugs = dict(WorkloadClass.objects.values_list("pk", "slug"))
    path = [row.slug]
    at = row.downgrade_to_id
    seen: set[int] = set()
    while at is not None and at != row.pk and at not in seen:
        seen.add(at)
        path.append(slugs[at])
        at = targets.get(at)
    if at is None or at != row.pk:
        return ""
    circle = " \N{RIGHTWARDS ARROW} ".join([*path, row.slug])
    return f"Downgrades would go in a circle: {circle}. Choose a class that does not lead back."


def _share_does_not_fit(row: WorkloadClass) -> str:
    served = ServedClass(row.slug, row.name, row.kind, row.min_share_ppm, tuple(row.model_names))
    if not served.min_share_ppm:
        return ""
    pools = Pool.objects.filter(archived_at=None).select_related("model").order_by("slug")
    for pool in pools.exclude(isolation=Pool.Isolation.SHARED):
        if served.serves(pool, pool.model.name):
            bands = Slot.objects.filter(pool=pool, removed_at__isnull=True).values_list("band", flat=True)
            if message := share_over_floor(served, Counter(bands)):
                return f"In pool {pool.slug} the floor is the share. {message}"
    return ""


def _check_unused(row: WorkloadClass) -> None:
    pools = Pool.objects.filter(archived_at=None)
    users = [
        *(f"pool {slug}" for slug in pools.filter(interactive_class=row.slug).values_list("slug", flat=True)),
        *(f"pool {slug}" for slug in pools.filter(batch_class=row.slug).values_list("slug", flat=True)),
        *(f"contract {slug}" for slug in row.contracts.filter(archived_at=None).values_list("slug", flat=True)),
        *(
            f"class {slug}"
            for slug in WorkloadClass.objects.filter(downgrade_to=row)
            .exclude(state="archived")
            .values_list("slug", flat=True)
        ),
        *(
            f"tenant {slug}"
            for slug in Tenant.objects.filter(classes__contains=[row.slug])
            .exclude(state="archived")
            .values_list("slug", flat=True)
        ),
    ]
    if users:
        shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
        raise ValidationError(f"The class is in use by {shown}. Take it off them first.", code="class_in_use")


# ---- rules of contracts ----


def _new_version(
    contract: Contract,
    number: int,
    values: Mapping[str, Any],
    effective_from: datetime,
    actor: Actor,
    now: datetime,
    reason: str,
) -> ContractVersion:
    row = ContractVersion(
        number=number, effective_from=effective_from, created_by=actor.name, created_at=now, reason=reason
    )
    if "target_ppm" not in values:
        raise ValidationError({"target_ppm": "Say which share is promised, such as 99 %."})
    _assign(row, values, VERSION_FIELDS)
    row.full_clean(exclude=["contract"], validate_unique=False, validate_constraints=False)
    _check_version_rules(contract, row)
    return row


def _check_version_rules(contract: Contract, row: ContractVersion) -> None:
    errors: dict[str, ValidationError] = {}
    if not 1 <= row.target_ppm < PPM:
        errors["target_ppm"] = ValidationError("Enter a share over 0 % and under 100 %.", code="out_of_range")
    elif not unreachable(row.target_ppm).kept:
        errors["target_ppm"] = ValidationError(
            "At this target no burn alert could ever fire. Raise the target.", code="no_alert_can_fire"
        )
    wanted = "batch" if row.objective == ContractVersion.Objective.DEADLINE else "interactive"
    if contract.workload_class.kind != wanted:
        errors["objective"] = ValidationError(
            f"{contract.workload_class.slug} is a {contract.workload_class.kind} class: a {row.objective} objective"
            f" needs a class of kind {wanted}.",
            code="class_kind_mismatch",
        )
    else:
        errors.update(_deadline_errors(row) if wanted == "batch" else _latency_errors(row))
    if not 1 <= row.budget_period_s <= PERIOD_MOST_S:
        errors["budget_period_s"] = ValidationError("Choose a budget period of at most 90 days.", code="out_of_range")
    if errors:
        raise ValidationError(errors)


def _latency_errors(row: ContractVersion) -> dict[str, ValidationError]:
    errors: dict[str, ValidationError] = {}
    if row.threshold_ms < 1:
        errors["threshold_ms"] = ValidationError("Enter the threshold in ms, 1 or more.", code="out_of_range")
    if not WINDOW_LEAST_S <= row.window_s <= WINDOW_MOST_S or row.window_s % 60:
        errors["window_s"] = ValidationError(
            "Choose a window of whole minutes, from 1 minute to 30 days.", code="out_of_range"
        )
    elif row.window_s > row.budget_period_s:
        errors["window_s"] = ValidationError("The window cannot be longer than the budget period.", code="out_of_range")
    if row.load_limit_per_s is not None and not 0 < row.load_limit_per_s < 1e6:
        errors["load_limit_per_s"] = ValidationError(
            "Enter requests per second over 0, or leave it empty for any load.", code="out_of_range"
        )
    if row.min_events < 1:
        errors["min_events"] = ValidationError("Enter 1 or more.", code="out_of_range")
    return errors


def _deadline_errors(row: ContractVersion) -> dict[str, ValidationError]:
    errors: dict[str, ValidationError] = {}
    for field in ("admitted_before", "finished_by"):
        if getattr(row, field) is None:
            errors[field] = ValidationError("Enter a time of day, such as 20:00.", code="required")
    try:
        load_zone(row.zone)
    except ValueError as error:
        errors["zone"] = ValidationError(str(error), code="zone_unknown")
    if row.first_attempt_within_s is not None and row.first_attempt_within_s < 60:
        errors["first_attempt_within_s"] = ValidationError(
            "Enter at least a minute, or leave it empty.", code="out_of_range"
        )
    return errors


# ---- parts ----


def _assign(row: Any, values: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise ValidationError(dict.fromkeys(unknown, "This cannot be set here."))
    for name, value in values.items():
        setattr(row, name, value)


def _class_values(row: WorkloadClass) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in CLASS_FIELDS}
    return {"kind": row.kind, **values, "downgrade_to": row.downgrade_to.slug if row.downgrade_to else None}


def _contract_values(contract: Contract, version: ContractVersion) -> dict[str, Any]:
    return {
        "class": contract.workload_class.slug,
        "tenant": contract.tenant.slug if contract.tenant else None,
        "number": version.number,
        "effective_from": version.effective_from,
        **{name: getattr(version, name) for name in VERSION_FIELDS},
        "reads": sentence(version),
    }


def _class_in_use(slug: str) -> WorkloadClass:
    row = WorkloadClass.objects.exclude(state="archived").filter(slug=slug).first()
    if row is None:
        raise ValidationError({"workload_class": f"There is no class {slug!r} in use. Choose one of the list."})
    return row


def _tenant_in_use(slug: str) -> Tenant:
    row = Tenant.objects.exclude(state="archived").filter(slug=slug).first()
    if row is None:
        raise ValidationError({"tenant": f"There is no tenant {slug!r} in use. Choose one, or none for all tenants."})
    return row


def _locked_class(slug: str, version: int | None) -> WorkloadClass:
    row = WorkloadClass.objects.get(slug=slug)
    _check_version(row, version)
    if row.state == WorkloadClass.State.ARCHIVED:
        raise ValidationError("The class is archived. Bring it back before you change it.", code="archived")
    return row


def _locked_contract(slug: str, version: int | None) -> Contract:
    rows = Contract.objects.select_for_update(of=("self",)).select_related("workload_class", "tenant")
    contract = rows.get(slug=slug)
    _check_version(contract, version)
    if contract.archived_at is not None:
        raise ValidationError("The contract has ended. Make a new one.", code="archived")
    return contract


def _check_version(row: WorkloadClass | Contract, version: int | None) -> None:
    if version is not None and row.version != version:
        raise Stale(row)


def _record_class(
    row: WorkloadClass,
    action: str,
    before: dict[str, Any] | None,
    after: dict[str, Any],
    actor: Actor,
    now: datetime,
    reason: str,
) -> None:
    record(
        actor=actor, action=action, noun="class", object_id=row.slug, now=now, before=before, after=after,
        reason=reason,
    )  # fmt: skip
