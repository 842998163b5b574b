"""Budgets, their windows, and the leases that agents spend: columns and constraints, no rules.

At every instant settled + leased <= limit of a hard window: the database holds the invariant.
"""

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from controlplane.tenants.models import Tenant


def default_thresholds() -> list[int]:
    return [50, 80, 100]


class Budget(models.Model):
    class Period(models.TextChoices):
        DAY = "day"
        WEEK = "week"
        MONTH = "month"

    id = models.AutoField(primary_key=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="budgets")
    name = models.CharField(max_length=120)
    period = models.CharField(max_length=5, choices=Period.choices, default=Period.MONTH)
    anchor_day = models.PositiveSmallIntegerField(default=1)
    zone = models.CharField(max_length=64, default="UTC")
    limit_nanos = models.BigIntegerField()
    hard = models.BooleanField(default=True)
    thresholds_percent = ArrayField(models.PositiveSmallIntegerField(), default=default_thresholds)
    archived_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField()
    updated_at = models.DateTimeField()
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(limit_nanos__gte=0), name="budget_limit_not_negative"),
            models.CheckConstraint(condition=Q(anchor_day__gte=1) & Q(anchor_day__lte=31), name="budget_anchor_day"),
        ]


class BudgetWindow(models.Model):
    """One period of one budget: half-open instants, what was settled and what is out on lease, in nanos."""

    id = models.BigAutoField(primary_key=True)
    budget = models.ForeignKey(Budget, on_delete=models.PROTECT, related_name="windows")
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    limit_nanos = models.BigIntegerField()
    hard = models.BooleanField(default=True)
    settled_nanos = models.BigIntegerField(default=0)
    leased_nanos = models.BigIntegerField(default=0)
    notified_percent = models.PositiveSmallIntegerField(default=0)
    """The highest threshold that is passed at present."""

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["budget", "starts_at"], name="budget_window_unique"),
            models.CheckConstraint(condition=Q(leased_nanos__gte=0), name="budget_window_lease_not_negative"),
            models.CheckConstraint(
                condition=Q(hard=False) | Q(limit_nanos__gte=F("settled_nanos") + F("leased_nanos")),
                name="hard_budget_never_overspent",
            ),
        ]


class BudgetIncrease(models.Model):
    """More than the limit for a time: in force in [starts_at, ends_at), or until `ended_at` where somebody ended it."""

    id = models.AutoField(primary_key=True)
    budget = models.ForeignKey(Budget, on_delete=models.PROTECT, related_name="increases")
    amount_nanos = models.BigIntegerField()
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    reason = models.TextField()
    made_at = models.DateTimeField()
    made_by = models.CharField(max_length=200)
    ended_at = models.DateTimeField(null=True, blank=True)
    ended_by = models.CharField(max_length=200, blank=True, default="")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(amount_nanos__gt=0), name="budget_increase_over_zero"),
            models.CheckConstraint(condition=Q(ends_at__gt=F("starts_at")), name="budget_increase_has_a_length"),
        ]


class BudgetNotice(models.Model):
    """A window's spend passed a threshold. One a crossing: a limit that is raised above it arms the threshold again."""

    id = models.BigAutoField(primary_key=True)
    window = models.ForeignKey(BudgetWindow, on_delete=models.PROTECT, related_name="notices")
    percent = models.PositiveSmallIntegerField()
    at = models.DateTimeField(db_index=True)
    settled_nanos = models.BigIntegerField()
    limit_nanos = models.BigIntegerField()


class BudgetForecast(models.Model):
    """What the window of a budget that ends at `ends_at` was likely to hold at its end, as of `made_at`; null: not
    known then. Lists are put in order by it; a page of a budget works its own out.
    """

    budget = models.OneToOneField(Budget, on_delete=models.CASCADE, primary_key=True, related_name="kept_forecast")
    ends_at = models.DateTimeField()
    point_nanos = models.BigIntegerField(null=True, blank=True)
    made_at = models.DateTimeField()


class Lease(models.Model):
    """Money an agent may spend for a tenant without asking. Counted until settled, sealed or written off.

    `reserved_nanos` is what running requests held when the agent last said so; `need_nanos` the upper bound of the
    request that asked for the lease. `waived_nanos` of what was spent nobody pays: the result was another's, and the
    charge was taken off its record. `outage`: a slice for the time in which the control plane cannot be asked.

    `job` is the UUID of a job whose requests alone it pays for. Without an agent it is the job's own reservation: what
    has not been handed to agents yet.
    """

    class State(models.TextChoices):
        OPEN = "open"
        CLOSED = "closed"

    id = models.BigAutoField(primary_key=True)
    agent_id = models.IntegerField(null=True, blank=True)
    epoch = models.IntegerField(null=True, blank=True)
    job = models.UUIDField(null=True, blank=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+")
    amount_nanos = models.BigIntegerField()
    spent_nanos = models.BigIntegerField(default=0)
    waived_nanos = models.BigIntegerField(default=0, db_default=0)
    reserved_nanos = models.BigIntegerField(default=0)
    need_nanos = models.BigIntegerField(default=0)
    outage = models.BooleanField(default=False, db_default=False)
    state = models.CharField(max_length=6, choices=State.choices, default=State.OPEN)
    granted_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    closed_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            # a reservation that was handed to agents as a whole holds nothing
            models.CheckConstraint(
                condition=Q(amount_nanos__gt=0) | Q(agent_id__isnull=True, amount_nanos=0),
                name="lease_amount_positive",
            ),
            models.CheckConstraint(
                condition=Q(agent_id__isnull=False, epoch__isnull=False)
                | Q(agent_id__isnull=True, epoch__isnull=True, job__isnull=False),
                name="lease_of_an_agent_or_a_job",
            ),
            models.UniqueConstraint(
                fields=["job"], condition=Q(agent_id__isnull=True, state="open"), name="lease_one_reservation_a_job"
            ),
            models.CheckConstraint(
                condition=Q(spent_nanos__gte=0) & Q(spent_nanos__lte=F("amount_nanos")),
                name="lease_spent_within_amount",
            ),
            models.CheckConstraint(
                condition=Q(waived_nanos__gte=0) & Q(waived_nanos__lte=F("spent_nanos")),
                name="lease_waived_within_spent",
            ),
        ]
        indexes = [
            models.Index(fields=["agent_id", "epoch", "state"]),
            models.Index(fields=["job"], condition=Q(job__isnull=False, state="open"), name="lease_of_a_job"),
        ]


class LeaseWindow(models.Model):
    """Which budget windows a lease was taken from; its spending settles in each of them."""

    lease = models.ForeignKey(Lease, on_delete=models.PROTECT, related_name="windows")
    window = models.ForeignKey(BudgetWindow, on_delete=models.PROTECT, related_name="leases")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["lease", "window"], name="lease_window_unique")]


class AgentDemand(models.Model):
    """What an agent was asked for in the last 10 s and who is there: shares of installation-wide limits follow it.

    `demand` is [[scope, id, requests, tokens, refused, present], ...]. The next report rebuilds the row, so it is
    unlogged. `told` is the division that its last answer came from, `acked` the one it has taken for sure; 0 is none.
    """

    agent_id = models.IntegerField(primary_key=True)
    pool_id = models.IntegerField()
    at = models.DateTimeField()
    demand = models.JSONField(default=list)
    told = models.BigIntegerField(default=0, db_default=0)
    acked = models.BigIntegerField(default=0, db_default=0)


class ShareDivision(models.Model):
    """Limits, agents and demand of one instant, from which every process divides alike. Kept for some seconds."""

    number = models.BigAutoField(primary_key=True)
    at = models.DateTimeField(db_index=True)
    body = models.JSONField()
