"""Reading rates: what is in force, what comes, and the history of each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from django.db.models import QuerySet

from controlplane.fleet.models import Pool, ServedModel
from controlplane.fleet.percent import percent_of_ppm
from controlplane.fleet.served_classes import served_classes
from controlplane.ledger.models import CostRate, RateCard


@dataclass(frozen=True, slots=True)
class CostLine:
    """A pool with its rate in force (None: its hours cannot be costed), the next one, and all, newest first."""

    pool: Pool
    in_force: CostRate | None
    next: CostRate | None
    history: tuple[CostRate, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.pool.slug, self.pool.name, self.pool.gpu_type)


@dataclass(frozen=True, slots=True)
class CardLine:
    """A class and model with its card in force (None: requests cannot be charged), the next one, and all."""

    class_slug: str
    model: ServedModel
    in_force: RateCard | None
    next: RateCard | None
    history: tuple[RateCard, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.class_slug, self.model.name)

    @property
    def discount(self) -> str | None:
        """Per cent."""
        return percent_of_ppm(self.in_force.discount_ppm) if self.in_force else None


def cost_lines(now: datetime) -> list[CostLine]:
    """One line a pool in use or with a rate; pools without a rate first."""
    rates: dict[int, list[CostRate]] = {}
    for rate in CostRate.objects.order_by("-effective_from"):
        rates.setdefault(rate.pool_id, []).append(rate)
    pools = [row for row in Pool.objects.order_by("slug") if row.archived_at is None or row.pk in rates]
    lines = [CostLine(pool, *_now_and_next(rates.get(pool.pk, []), now)) for pool in pools]
    return sorted(lines, key=lambda line: line.in_force is not None)


def card_lines(now: datetime) -> list[CardLine]:
    """One line a class and model that a pool serves or that has a card; those without a card in force first."""
    cards: dict[tuple[str, int], list[RateCard]] = {}
    for card in RateCard.objects.order_by("-effective_from"):
        cards.setdefault((card.class_slug, card.model_id), []).append(card)
    models = {row.pk: row for row in ServedModel.objects.all()}
    keys = sorted(set(cards) | set(served_pairs()), key=lambda key: (key[0], models[key[1]].name))
    lines = [CardLine(slug, models[pk], *_now_and_next(cards.get((slug, pk), []), now)) for slug, pk in keys]
    return sorted(lines, key=lambda line: line.in_force is not None)


Line = TypeVar("Line", CostLine, CardLine)


def chosen(lines: Sequence[Line], *, text: str = "", sort: str = "attention") -> list[Line]:
    """The lines whose names hold the text, those without a rate in force first (as they come), by name, or those with
    the newest version first.
    """
    wanted = text.casefold()
    found = [line for line in lines if any(wanted in name.casefold() for name in line.names)]
    if sort == "name":
        return sorted(found, key=lambda line: line.names)
    if sort == "newest":
        return sorted(found, key=lambda line: -line.history[0].pk if line.history else 0)
    return found


def served_pairs() -> Iterable[tuple[str, int]]:
    """(class, model id) of everything that pools in use serve: what needs a rate card."""
    classes = served_classes()
    for pool in Pool.objects.filter(archived_at=None).select_related("model"):
        for row in classes:
            if row.serves(pool, pool.model.name):
                yield row.slug, pool.model_id


def _now_and_next(rows: Sequence, now: datetime) -> tuple:
    """(in force, next, all) of versions that are newest first."""
    begun = [row for row in rows if row.effective_from <= now]
    coming = [row for row in rows if row.effective_from > now]
    return (begun[0] if begun else None, coming[-1] if coming else None, tuple(rows))


def newest_cost_rate(pool: Pool) -> CostRate | None:
    return CostRate.objects.filter(pool=pool).order_by("-effective_from").first()


def newest_rate_card(class_slug: str, model: ServedModel) -> RateCard | None:
    return RateCard.objects.filter(class_slug=class_slug, model=model).order_by("-effective_from").first()


def cost_rates() -> QuerySet[CostRate]:
    return CostRate.objects.select_related("pool")


def rate_cards() -> QuerySet[RateCard]:
    return RateCard.objects.select_related("model")


def live_cards(now: datetime) -> list[RateCard]:
    """Of every class and model the rate card in force and those to come, in a fixed order."""
    kept: list[RateCard] = []
    in_force: set[tuple[str, int]] = set()
    for row in RateCard.objects.order_by("class_slug", "model_id", "-effective_from"):
        key = (row.class_slug, row.model_id)
        if key in in_force:
            continue
        if row.effective_from <= now:
            in_force.add(key)
        kept.append(row)
    return sorted(kept, key=lambda row: (row.class_slug, row.model_id, row.effective_from))
