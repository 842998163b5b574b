"""What a contract version would be judged at over the last weeks: all three populations, beside each other."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from fractions import Fraction

from django.db.models import Count, F, Q, Sum

from controlplane.contracts.models import ContractVersion, ObjectiveMinute
from controlplane.core.slo import Compliance, Objective, Population, Totals, judge_population

PPM = 1_000_000
RECORD_DAYS = 28
COUNTS = ("offered", "admitted", "successful", "good", "neutral")


@dataclass(frozen=True, slots=True)
class PopulationLine:
    """One population on a screen: `share` None is unknown."""

    population: str
    share: float | None
    total: int


@dataclass(frozen=True, slots=True)
class Record:
    """Compliance by population over the last days; minutes over the load range are counted apart."""

    days: int
    populations: tuple[PopulationLine, ...]
    minutes: int
    minutes_out_of_range: int

    @property
    def all_minutes(self) -> int:
        return self.minutes + self.minutes_out_of_range

    @property
    def empty(self) -> bool:
        return not self.all_minutes


def record_of(version: ContractVersion, now: datetime) -> Record | None:
    """The record of a latency version, None for a deadline one: its jobs are judged night by night."""
    if version.objective != ContractVersion.Objective.LATENCY:
        return None
    minutes = ObjectiveMinute.objects.filter(
        contract_version_id=version.pk, minute__gte=now - timedelta(days=RECORD_DAYS), minute__lte=now
    )
    limit = version.load_limit_per_s
    inside = Q(admitted__lte=F("admitted")) if limit is None else Q(admitted__lte=limit * 60)
    sums = minutes.aggregate(
        inside=Count("id", filter=inside),
        outside=Count("id", filter=~inside),
        **{f"sum_{name}": Sum(name, filter=inside, default=0) for name in COUNTS},
    )
    totals = Totals(**{name: int(sums[f"sum_{name}"]) for name in COUNTS})
    objective = Objective(
        target=Fraction(version.target_ppm, PPM),
        population=Population(version.population),
        load_max_per_s=limit,
        min_events=version.min_events,
    )
    judged = [judge_population(totals, population, objective) for population in Population]
    return Record(RECORD_DAYS, tuple(_line(one) for one in judged), sums["inside"], sums["outside"])


def _line(judged: Compliance) -> PopulationLine:
    share = None if judged.compliance is None else float(judged.compliance)
    return PopulationLine(judged.population.value, share, judged.total)
