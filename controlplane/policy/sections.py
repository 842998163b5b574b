"""The configuration as sections of plain items: what an export writes and a file may say. Never a secret, never a state
that acts at once (suspensions, freezes, keys): those are decided by people in the moment, not by a file.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, time
from typing import Any

from django.contrib.postgres.fields import ArrayField
from django.db import models

from controlplane.budgets import actions as budgets
from controlplane.budgets.models import Budget
from controlplane.contracts.actions import CLASS_FIELDS, VERSION_FIELDS
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.fleet.actions import POOL_FIELDS, SLOT_FIELDS
from controlplane.fleet.models import Pool, Slot
from controlplane.ledger.rate_queries import cost_rates, rate_cards
from controlplane.ledger.rates import CARD_FIELDS
from controlplane.policy.configuration import instant
from controlplane.tenants import actions as tenants
from controlplane.tenants.models import Tenant

FORM = 1
# What an action edits; a parent and a budget's key are named in a file, not numbered.
TENANT_FIELDS = tuple(name for name in tenants.EDITABLE if name != "parent_id")
BUDGET_FIELDS = (*(name for name in budgets.EDITABLE if name != "name"), "period", "anchor_day", "zone")

Item = dict[str, Any]
Key = tuple[str, ...]


@dataclass(frozen=True)
class Type:
    """What a value has to be, as a file's reader is told."""

    said: str
    holds: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_instant(value: Any) -> bool:
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _is_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and time.fromisoformat(value).tzinfo is None
    except ValueError:
        return False


TEXT = Type("text", lambda value: isinstance(value, str) and "\x00" not in value)
INT = Type("a whole number", _is_int)
NUMBER = Type("a number", lambda value: _is_int(value) or isinstance(value, float))
YES = Type("true or false", lambda value: isinstance(value, bool))
TEXTS = Type("a list of text", lambda value: isinstance(value, list) and all(TEXT.holds(one) for one in value))
INTS = Type("a list of whole numbers", lambda value: isinstance(value, list) and all(map(_is_int, value)))
TABLE = Type("names with values", lambda value: isinstance(value, dict))
INSTANT = Type("an instant such as 2026-12-01T00:00:00Z", _is_instant)
CLOCK = Type("a time of day such as '20:00'", _is_time)


def or_none(kind: Type) -> Type:
    return Type(f"{kind.said}, or null", lambda value: value is None or kind.holds(value))


def _types(model: type[models.Model], names: Iterable[str]) -> dict[str, Type]:
    return {name: _type_of(model._meta.get_field(name)) for name in names}


def _type_of(column: Any) -> Type:
    kind = _plain_type(column)
    return or_none(kind) if column.null else kind


def _plain_type(column: Any) -> Type:
    if isinstance(column, ArrayField):
        return INTS if isinstance(column.base_field, models.IntegerField) else TEXTS
    kinds: tuple[tuple[type, Type], ...] = (
        (models.BooleanField, YES),
        (models.IntegerField, INT),
        (models.FloatField, NUMBER),
        (models.TimeField, CLOCK),
        (models.JSONField, TABLE),
        (models.CharField, TEXT),
        (models.ForeignKey, TEXT),
    )
    return next(kind for field, kind in kinds if isinstance(column, field))


@dataclass(frozen=True)
class Section:
    """One part of a file. `key` names an item; `fixed` fields are set once; `dated` is the list of what has an instant,
    which is added to and never changed; `parts` are rows of their own (a pool's slots), named by `name`.
    """

    name: str
    noun: str
    key: tuple[str, ...]
    types: dict[str, Type]
    fixed: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    dated: str = ""
    parts: str = ""
    child_types: dict[str, Type] | None = None
    may_clear: bool = True

    def key_of(self, item: Item) -> Key:
        return tuple(str(item.get(name)) for name in self.key)


_CLASS = {"slug": TEXT, "kind": TEXT, **_types(WorkloadClass, CLASS_FIELDS)}
_POOL = {"slug": TEXT, "model": TEXT, **_types(Pool, POOL_FIELDS)}
SECTIONS = (
    Section("classes", "class", ("slug",), _CLASS, ("kind",), ("slug", "kind")),
    Section(
        "tenants",
        "tenant",
        ("slug",),
        {"slug": TEXT, "parent": or_none(TEXT), **_types(Tenant, TENANT_FIELDS)},
        (),
        ("slug",),
    ),
    Section(
        "pools",
        "pool",
        ("slug",),
        _POOL,
        ("model",),
        ("slug", "model"),
        parts="slots",
        child_types={"name": TEXT, **_types(Slot, SLOT_FIELDS)},
    ),
    Section(
        "contracts",
        "contract",
        ("slug",),
        {"slug": TEXT, "name": TEXT, "class": TEXT, "tenant": or_none(TEXT)},
        ("name", "class", "tenant"),
        ("slug", "class", "versions"),
        dated="versions",
        child_types={"effective_from": INSTANT, **_types(ContractVersion, VERSION_FIELDS)},
    ),
    Section(
        "rate_cards",
        "rate card",
        ("class", "model"),
        {"class": TEXT, "model": TEXT},
        (),
        ("class", "model", "cards"),
        dated="cards",
        child_types={"effective_from": INSTANT, **dict.fromkeys(CARD_FIELDS, INT)},
        may_clear=False,
    ),
    Section(
        "cost_rates",
        "cost rate",
        ("pool",),
        {"pool": TEXT},
        (),
        ("pool", "rates"),
        dated="rates",
        child_types={"effective_from": INSTANT, "nanos_per_slot_hour": INT},
        may_clear=False,
    ),
    Section(
        "budgets",
        "budget",
        ("tenant", "name"),
        {"tenant": TEXT, "name": TEXT, **_types(Budget, BUDGET_FIELDS)},
        (),
        ("tenant", "name", "limit_nanos"),
    ),
)
BY_NAME = {section.name: section for section in SECTIONS}


def read_sections(now: datetime) -> dict[str, list[Item]]:
    """Everything that is in use, in a fixed order: of what has an instant, what is in force at `now` and to come."""
    return {
        "classes": [_class(row) for row in _classes()],
        "tenants": _tenants(),
        "pools": _pools(),
        "contracts": _contracts(now),
        "rate_cards": _dated_groups(rate_cards().select_related("model"), ("class", "model"), "cards", _card, now),
        "cost_rates": _dated_groups(
            cost_rates().filter(pool__archived_at=None).select_related("pool"), ("pool",), "rates", _cost_rate, now
        ),
        "budgets": _budgets(),
    }


def plain(value: Any) -> Any:
    """A column's value as a file has it."""
    if isinstance(value, datetime):
        return instant(value.astimezone(UTC))
    if isinstance(value, time):
        return value.isoformat("seconds" if value.second else "minutes")
    if isinstance(value, models.Model):
        return getattr(value, "slug", None) or str(value)
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, str):
        return str(value)
    return value


def _fields(row: models.Model, names: Iterable[str]) -> Item:
    return {name: plain(getattr(row, name)) for name in names}


def _classes() -> Iterable[WorkloadClass]:
    rows = WorkloadClass.objects.exclude(state=WorkloadClass.State.ARCHIVED)
    return rows.select_related("downgrade_to").order_by("slug")


def _class(row: WorkloadClass) -> Item:
    return {"slug": row.slug, "kind": str(row.kind), **_fields(row, CLASS_FIELDS)}


def _columns(rows: models.QuerySet[Any, Any], paths: dict[str, str]) -> list[Item]:
    """Items of rows that are many, straight from their columns: as models, ten thousand take five times as long."""
    names = tuple(paths)
    return [
        {name: value if type(value) in _PLAIN else plain(value) for name, value in zip(names, values, strict=True)}
        for values in rows.values_list(*paths.values())
    ]


_PLAIN = frozenset({str, int, bool, type(None)})


def _tenants() -> list[Item]:
    rows = Tenant.objects.exclude(state=Tenant.State.ARCHIVED).order_by("slug")
    return _columns(rows, {"slug": "slug", "parent": "parent__slug", **{name: name for name in TENANT_FIELDS}})


def _pools() -> list[Item]:
    slots: dict[int, list[Item]] = {}
    for slot in Slot.objects.filter(removed_at=None).order_by("pool_id", "name"):
        slots.setdefault(slot.pool_id, []).append({"name": slot.name, **_fields(slot, SLOT_FIELDS)})
    rows = Pool.objects.filter(archived_at=None).select_related("model").order_by("slug")
    return [
        {"slug": row.slug, "model": row.model.name, **_fields(row, POOL_FIELDS), "slots": slots.get(row.pk, [])}
        for row in rows
    ]


def _contracts(now: datetime) -> list[Item]:
    rows = Contract.objects.filter(archived_at=None).select_related("workload_class", "tenant")
    rows = rows.only("slug", "name", "workload_class__slug", "tenant__slug")
    return [
        {
            "slug": row.slug,
            "name": row.name,
            "class": row.workload_class.slug,
            "tenant": row.tenant.slug if row.tenant else None,
            "versions": [
                {"effective_from": instant(one.effective_from), **_fields(one, VERSION_FIELDS)}
                for one in in_force_and_to_come(row.versions.all(), now)
            ],
        }
        for row in rows.prefetch_related("versions").order_by("slug")
    ]


def in_force_and_to_come(rows: Iterable[Any], now: datetime) -> list[Any]:
    ordered = sorted(rows, key=lambda row: row.effective_from)
    begun = [row for row in ordered if row.effective_from <= now]
    return begun[-1:] + [row for row in ordered if row.effective_from > now]


def _card(row: Any) -> tuple[Key, Item]:
    return (row.class_slug, row.model.name), _fields(row, CARD_FIELDS)


def _cost_rate(row: Any) -> tuple[Key, Item]:
    return (row.pool.slug,), {"nanos_per_slot_hour": row.nanos_per_slot_hour}


def _dated_groups(
    rows: Iterable[Any], names: tuple[str, ...], children: str, read: Callable[[Any], tuple[Key, Item]], now: datetime
) -> list[Item]:
    groups: dict[Key, list[Any]] = {}
    for row in rows:
        groups.setdefault(read(row)[0], []).append(row)
    return [
        {
            **dict(zip(names, key, strict=True)),
            children: [
                {"effective_from": instant(row.effective_from), **read(row)[1]}
                for row in in_force_and_to_come(groups[key], now)
            ],
        }
        for key in sorted(groups)
    ]


def _budgets() -> list[Item]:
    rows = Budget.objects.filter(archived_at=None).exclude(tenant__state=Tenant.State.ARCHIVED)
    paths = {"tenant": "tenant__slug", "name": "name", **{name: name for name in BUDGET_FIELDS}}
    return _columns(rows.order_by("tenant__slug", "name", "pk"), paths)
