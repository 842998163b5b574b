"""Reading budgets: the doors, where each stands in its present window, and the leases that are out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.contrib.auth.models import AnonymousUser, User
from django.db.models import Case, IntegerField, QuerySet, Value, When
from django.http import Http404

from controlplane.budgets.forecasts import Outlook, outlook, spend_days
from controlplane.budgets.increase_queries import in_force
from controlplane.budgets.models import Budget, BudgetIncrease, BudgetNotice, BudgetWindow, Lease
from controlplane.budgets.spend_states import FORECAST, NEAR, OK, OVER, STOPPED, budgets_in_state, spend_state
from controlplane.core.period import Calendar, load_zone, window_at
from controlplane.core.spend_forecast import DaySpend
from controlplane.fleet.models import Agent
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import of_visible_tenants


@dataclass(frozen=True, slots=True)
class Standing:
    """A budget in its present window.

    `limit_nanos` is the budget's limit with its increases of this instant, which end by `raised_until` one after the
    other; `limit_in_force_nanos` is above it while leases are still out.
    """

    budget: Budget
    starts_at: datetime
    ends_at: datetime
    settled_nanos: int
    leased_nanos: int
    limit_nanos: int
    limit_in_force_nanos: int
    raised_until: datetime | None
    outlook: Outlook

    @property
    def forecast_nanos(self) -> int | None:
        """The likely spend at the window's end; None while it is unknown."""
        return self.outlook.forecast.point_nanos if self.outlook.forecast else None

    @property
    def increase_nanos(self) -> int:
        return self.limit_nanos - self.budget.limit_nanos

    @property
    def left_nanos(self) -> int:
        return max(0, self.limit_in_force_nanos - self.settled_nanos - self.leased_nanos)

    @property
    def state(self) -> str:
        """`stopped` (hard and nothing left), `over` (soft, passed), `near` (at 80 %), `forecast` (over it), `ok`."""
        if self.budget.archived_at is not None:
            return "archived"
        used = spend_state(
            settled_nanos=self.settled_nanos, leased_nanos=self.leased_nanos, limit_nanos=self.limit_nanos,
            hard=self.budget.hard,
        )  # fmt: skip
        if used != OK:
            return used
        if self.forecast_nanos is not None and self.forecast_nanos > self.limit_nanos:
            return "forecast"
        return OK

    @property
    def grade(self) -> str:
        """The chip's state."""
        grades = {"stopped": "bad", "over": "bad", "near": "risk", "forecast": "risk", "archived": "neutral"}
        return grades.get(self.state, "ok")

    @property
    def word(self) -> str:
        words = {
            "stopped": "Stopped",
            "over": "Over limit",
            "near": "Near limit",
            "forecast": "Over forecast",
            "archived": "Archived",
        }
        return words.get(self.state, "OK")

    @property
    def limit_is_lowering(self) -> bool:
        return self.limit_in_force_nanos > self.limit_nanos


@dataclass(frozen=True, slots=True)
class OutstandingLease:
    """Money an agent may still spend without asking."""

    lease: Lease
    agent_name: str
    pool: str
    reported_at: datetime | None


def visible_budgets(user: User | AnonymousUser) -> QuerySet[Budget]:
    """Budgets of the tenants that the person may see."""
    return of_visible_tenants(user, Budget.objects.select_related("tenant"))


def budget_for(user: User | AnonymousUser, budget_id: int) -> Budget:
    """The only door to a budget. Not allowed and not existing look the same: Http404."""
    budget = visible_budgets(user).filter(pk=budget_id).first()
    if budget is None:
        raise Http404("There is no such budget.")
    return budget


def standings(budgets: Iterable[Budget], now: datetime) -> list[Standing]:
    """Each budget in its present window, in the order given; three queries for all of them.

    A window without a row was never drawn on: nothing is settled in it.
    """
    rows = list(budgets)
    windows = {
        (window.budget_id, window.starts_at): window
        for window in BudgetWindow.objects.filter(budget__in=rows, starts_at__lte=now, ends_at__gt=now)
    }
    raised: dict[int, list[BudgetIncrease]] = {}
    for increase in BudgetIncrease.objects.filter(in_force(now), budget__in=rows):
        raised.setdefault(increase.budget_id, []).append(increase)
    days = spend_days((row.tenant_id for row in rows if row.archived_at is None), now)
    return [
        _standing(row, windows, raised.get(row.pk, []), [] if row.archived_at else days.get(row.tenant_id, []), now)
        for row in rows
    ]


STATES = {
    "stopped": (STOPPED, OVER),
    "near": (NEAR,),
    "forecast": (FORECAST,),
}
"""States that lists are filtered by: the worst first, which is also the order of attention."""


def by_attention(budgets: QuerySet[Budget], now: datetime) -> QuerySet[Budget]:
    """With the annotation `attention` that sorts what needs it first; archived ones come last."""
    return budgets.annotate(
        attention=Case(
            When(archived_at__isnull=False, then=Value(len(STATES) + 1)),
            *(
                When(pk__in=budgets_in_state(*states, now=now), then=Value(place))
                for place, states in enumerate(STATES.values())
            ),
            default=Value(len(STATES)),
            output_field=IntegerField(),
        )
    )


def history(budget: Budget, limit: int = 12) -> list[BudgetWindow]:
    """The latest windows that were drawn on, newest first."""
    return list(BudgetWindow.objects.filter(budget=budget).order_by("-starts_at")[:limit])


def outstanding_leases(tenants: Sequence[Tenant]) -> list[OutstandingLease]:
    """Open leases of tenants, the largest first, with the agent that holds each."""
    leases = list(
        Lease.objects.filter(tenant__in=tenants, state=Lease.State.OPEN).order_by("-amount_nanos", "id")[:200]
    )
    agents = {
        agent.pk: agent
        for agent in Agent.objects.filter(pk__in={lease.agent_id for lease in leases}).select_related("pool", "live")
    }
    found = []
    for lease in leases:
        agent = None if lease.agent_id is None else agents.get(lease.agent_id)
        live = getattr(agent, "live", None)
        found.append(
            OutstandingLease(
                lease=lease,
                agent_name=agent.name if agent else _holder_name(lease),
                pool=agent.pool.slug if agent else "",
                reported_at=live.reported_at if live else None,
            )
        )
    return found


def _holder_name(lease: Lease) -> str:
    return f"job {str(lease.job)[:8]}" if lease.agent_id is None else f"agent {lease.agent_id}"


def ancestors(tenant: Tenant) -> list[Tenant]:
    """The tenant's parents, nearest first."""
    found: list[Tenant] = []
    at = tenant.parent
    while at is not None and len(found) < 32:
        found.append(at)
        at = at.parent
    return found


def _standing(
    budget: Budget,
    windows: dict[tuple[int, datetime], BudgetWindow],
    increases: Sequence[BudgetIncrease],
    days: list[DaySpend],
    now: datetime,
) -> Standing:
    span = window_at(load_zone(budget.zone), Calendar(budget.period), now, anchor_day=budget.anchor_day)
    window = windows.get((budget.pk, span.start))
    settled = window.settled_nanos if window else 0
    leased = window.leased_nanos if window else 0
    limit = budget.limit_nanos + sum(increase.amount_nanos for increase in increases)
    return Standing(
        budget=budget,
        starts_at=span.start,
        ends_at=span.end,
        settled_nanos=settled,
        leased_nanos=leased,
        limit_nanos=limit,
        limit_in_force_nanos=max(limit, settled + leased) if budget.hard else limit,
        raised_until=max((increase.ends_at for increase in increases), default=None),
        outlook=outlook(days, span, budget.zone, now, settled_nanos=settled, limit_nanos=limit),
    )


def notices(budgets: Iterable[Budget], limit: int = 50) -> list[BudgetNotice]:
    """Thresholds that were passed, the latest first."""
    found = BudgetNotice.objects.filter(window__budget__in=list(budgets)).select_related("window__budget__tenant")
    return list(found.order_by("-id")[:limit])
