"""Rates and the double-entry book: columns and constraints. One row of `Transfer` balances by construction.

Event and transfer rows are never updated or deleted; the database refuses it for every role.
"""

from uuid import uuid4

from django.db import models
from django.db.models import F, Q

from controlplane.fleet.models import Pool, ServedModel


class CostRate(models.Model):
    """What one slot-hour of a pool costs us from an instant on; versions are added, never changed."""

    id = models.AutoField(primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="cost_rates")
    nanos_per_slot_hour = models.BigIntegerField()
    effective_from = models.DateTimeField()
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=200)
    reason = models.TextField(blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["pool", "effective_from"], name="cost_rate_instant_unique"),
            models.CheckConstraint(condition=Q(nanos_per_slot_hour__gte=0), name="cost_rate_not_negative"),
        ]


class RateCard(models.Model):
    """What tenants are charged for a class and model from an instant on; its id is the record's `rate_version`."""

    id = models.AutoField(primary_key=True)
    class_slug = models.CharField(max_length=63)
    model = models.ForeignKey(ServedModel, on_delete=models.PROTECT, related_name="rate_cards")
    effective_from = models.DateTimeField()
    prompt_nanos_per_mtok = models.BigIntegerField()
    cached_nanos_per_mtok = models.BigIntegerField()
    output_nanos_per_mtok = models.BigIntegerField()
    gpu_nanos_per_slot_hour = models.BigIntegerField(default=0)
    discount_ppm = models.PositiveIntegerField(default=0)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=200)
    reason = models.TextField(blank=True, default="")

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["class_slug", "model", "effective_from"], name="rate_card_instant_unique"),
            models.CheckConstraint(
                condition=Q(prompt_nanos_per_mtok__gte=0)
                & Q(cached_nanos_per_mtok__gte=0)
                & Q(output_nanos_per_mtok__gte=0)
                & Q(gpu_nanos_per_slot_hour__gte=0),
                name="rate_card_not_negative",
            ),
            models.CheckConstraint(condition=Q(discount_ppm__lte=1_000_000), name="rate_card_discount_at_most_1"),
        ]


class Account(models.Model):
    """`code` is readable and stable: `fleet:<pool>`, `tenant:<slug>:<class>:<line>`, `platform:<class>:<line>`."""

    id = models.AutoField(primary_key=True)
    code = models.CharField(max_length=200, unique=True)
    kind = models.CharField(max_length=20)
    tenant_slug = models.CharField(max_length=63, blank=True, default="", db_index=True)
    class_slug = models.CharField(max_length=63, blank=True, default="")
    pool_slug = models.CharField(max_length=63, blank=True, default="")
    line = models.CharField(max_length=40, blank=True, default="")


class LedgerEvent(models.Model):
    """A business event groups transfers under one key; the same key with other lines is an error.

    `source` names what is accounted for (`attribution:<pool>:<start>`): the balances of one source are the sum of all
    its events, so a later run posts only the difference.
    """

    id = models.BigAutoField(primary_key=True)
    key = models.CharField(max_length=200, unique=True)
    kind = models.CharField(max_length=30)
    digest = models.CharField(max_length=64)
    posted_at = models.DateTimeField()
    period = models.CharField(max_length=7, db_index=True)
    source = models.CharField(max_length=120, blank=True, default="", db_index=True)
    interval_start = models.DateTimeField(null=True)
    interval_end = models.DateTimeField(null=True)
    corrects = models.ForeignKey("self", null=True, blank=True, on_delete=models.PROTECT, related_name="corrections")
    reason = models.TextField(blank=True, default="")
    created_by = models.CharField(max_length=200)


class Transfer(models.Model):
    id = models.BigAutoField(primary_key=True)
    event = models.ForeignKey(LedgerEvent, on_delete=models.PROTECT, related_name="transfers")
    debit = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="debits")
    credit = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="credits")
    amount_nanos = models.BigIntegerField()
    period = models.CharField(max_length=7)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(amount_nanos__gt=0), name="transfer_amount_positive"),
            models.CheckConstraint(condition=~Q(debit=F("credit")), name="transfer_between_two_accounts"),
        ]
        indexes = [models.Index(fields=["debit", "period"]), models.Index(fields=["credit", "period"])]


class AttributionInterval(models.Model):
    """The last attribution of one pool and (cut) hour: which input it saw, which run's lines are in force.

    `cost_nanos` null: no rate was in force, the cost is unknown. `unpriced_us` is slot time without a rate. `policy`
    is the idle policy that was used (`idle`, `weights`, `lend_price_share_ppm`): kept from the run that completed the
    interval, so that a later run does not apply today's policy to the past. Until `complete` the end grows.
    """

    class State(models.TextChoices):
        PRICED = "priced"
        PARTLY_UNPRICED = "partly_unpriced"
        UNPRICED = "unpriced"

    id = models.BigAutoField(primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+")
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    run = models.PositiveIntegerField(default=0)
    input_digest = models.CharField(max_length=64, blank=True, default="")
    method = models.CharField(max_length=40)
    policy = models.JSONField(default=dict)
    state = models.CharField(max_length=15, choices=State.choices, default=State.PRICED)
    cost_nanos = models.BigIntegerField(null=True)
    owned_us = models.BigIntegerField(default=0)
    busy_us = models.BigIntegerField(default=0)
    metered_us = models.BigIntegerField(default=0)
    unpriced_us = models.BigIntegerField(default=0)
    findings = models.JSONField(default=list)
    attributed_at = models.DateTimeField()
    complete = models.BooleanField(default=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["pool", "starts_at"], name="attribution_interval_unique")]
        indexes = [models.Index(fields=["starts_at"])]


class AttributionLine(models.Model):
    """A line of the run in force of an interval; the lines of an interval add up to its cost exactly.

    `gpu_us` is slot time at the pool's full rate: lines add up to the interval's slot time. `amount_nanos` null: no
    rate was in force, so the amount is unknown.
    """

    id = models.BigAutoField(primary_key=True)
    interval = models.ForeignKey(AttributionInterval, on_delete=models.CASCADE, related_name="lines")
    tenant_slug = models.CharField(max_length=63)
    class_slug = models.CharField(max_length=63, blank=True, default="")
    line = models.CharField(max_length=40)
    gpu_us = models.BigIntegerField(default=0)
    amount_nanos = models.BigIntegerField(null=True)

    class Meta:
        indexes = [models.Index(fields=["tenant_slug"])]


class InvoiceMapping(models.Model):
    """How a provider's own CSV is read: `columns` names the headers of each fact, see `invoice_columns.ColumnMap`.

    `decimal_mark` and `day_order` settle what a file leaves open; empty means that the file tells.
    """

    id = models.AutoField(primary_key=True)
    name = models.SlugField(max_length=63, unique=True)
    columns = models.JSONField()
    categories = models.JSONField(default=dict)
    provider_name = models.CharField(max_length=63, blank=True, default="")
    fixed_currency = models.CharField(max_length=3, blank=True, default="")
    decimal_mark = models.CharField(max_length=5, blank=True, default="")
    day_order = models.CharField(max_length=11, blank=True, default="")
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=200)
    version = models.IntegerField(default=1)


class Invoice(models.Model):
    """One provider's file for one period, taken whole. `exchange_rate` is book currency per unit of `currency`.

    A withdrawn invoice counts nowhere and stays readable. `missed_by` is the closing of its month that was made without
    it, null when the month was open; `late_in` the month that was the next open one then.
    """

    class State(models.TextChoices):
        CURRENT = "current"
        WITHDRAWN = "withdrawn"

    id = models.BigAutoField(primary_key=True)
    period = models.CharField(max_length=10, db_index=True)
    file_name = models.CharField(max_length=255)
    file_sha256 = models.CharField(max_length=64)
    format = models.CharField(max_length=10)
    mapping = models.ForeignKey(InvoiceMapping, on_delete=models.PROTECT, null=True, blank=True, related_name="+")
    currency = models.CharField(max_length=3)
    exchange_rate = models.DecimalField(max_digits=30, decimal_places=15, null=True, blank=True)
    exchange_date = models.DateField(null=True, blank=True)
    lines_count = models.PositiveIntegerField()
    outside_period = models.PositiveIntegerField(default=0)
    state = models.CharField(max_length=9, choices=State.choices, default=State.CURRENT)
    missed_by = models.PositiveIntegerField(null=True, blank=True)
    late_in = models.CharField(max_length=7, blank=True, default="")
    imported_at = models.DateTimeField()
    imported_by = models.CharField(max_length=200)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["file_sha256", "period"], condition=Q(state="current"), name="invoice_file_once_a_period"
            ),
            models.CheckConstraint(
                condition=Q(exchange_rate__isnull=True, exchange_date__isnull=True)
                | Q(exchange_rate__gt=0, exchange_date__isnull=False),
                name="invoice_rate_is_dated",
            ),
        ]


class InvoiceLine(models.Model):
    """A line as the file has it, amounts exact in the invoice's currency; `line` counts the file's lines from 1.

    `effective` and `quantity` null: the file does not say. `day` is the day in the billing zone.
    """

    id = models.BigAutoField(primary_key=True)
    invoice = models.ForeignKey(Invoice, on_delete=models.CASCADE, related_name="lines")
    line = models.PositiveIntegerField()
    billed = models.DecimalField(max_digits=60, decimal_places=30)
    effective = models.DecimalField(max_digits=60, decimal_places=30, null=True)
    category = models.CharField(max_length=12)
    provider = models.CharField(max_length=200, blank=True, default="")
    account = models.CharField(max_length=200, blank=True, default="")
    sku = models.CharField(max_length=200, blank=True, default="")
    region = models.CharField(max_length=200, blank=True, default="")
    service = models.CharField(max_length=200, blank=True, default="")
    description = models.CharField(max_length=200, blank=True, default="")
    day = models.DateField()
    starts_at = models.DateTimeField(null=True)
    quantity = models.DecimalField(max_digits=60, decimal_places=30, null=True)
    unit = models.CharField(max_length=200, blank=True, default="")
    provider_line_id = models.CharField(max_length=200, blank=True, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["invoice", "line"], name="invoice_line_once")]
        indexes = [models.Index(fields=["invoice", "category"])]


class InvoiceUpload(models.Model):
    """A provider's file that a person looks through in the browser before it is taken; gone once it is, or a day later.

    It counts nowhere: an invoice is only what was taken.
    """

    id = models.UUIDField(primary_key=True, default=uuid4)
    period = models.CharField(max_length=7)
    file_name = models.CharField(max_length=255)
    size_bytes = models.PositiveIntegerField()
    content = models.BinaryField()
    uploaded_at = models.DateTimeField(db_index=True)
    uploaded_by = models.CharField(max_length=200)


class PoolSku(models.Model):
    """What a pool's slots are called on the provider's invoice. Empty parts match every invoice line.

    `units_per_slot_hour`: invoiced units that one slot-hour is, such as 2 GPU-hours of a slot on two GPUs.
    """

    pool = models.OneToOneField(Pool, on_delete=models.PROTECT, primary_key=True, related_name="+")
    provider = models.CharField(max_length=200, blank=True, default="")
    account = models.CharField(max_length=200, blank=True, default="")
    sku = models.CharField(max_length=200)
    region = models.CharField(max_length=200, blank=True, default="")
    units_per_slot_hour = models.DecimalField(max_digits=20, decimal_places=10, default=1)
    updated_at = models.DateTimeField()
    updated_by = models.CharField(max_length=200)
    version = models.IntegerField(default=1)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(units_per_slot_hour__gt=0), name="pool_sku_units_over_zero")]


class PlannedExchangeRate(models.Model):
    """The rate that the book's prices of a foreign invoice were planned with, from a day on; added, never changed."""

    id = models.AutoField(primary_key=True)
    currency = models.CharField(max_length=3)
    effective_from = models.DateField()
    rate = models.DecimalField(max_digits=30, decimal_places=15)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=200)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["currency", "effective_from"], name="planned_rate_day_unique"),
            models.CheckConstraint(condition=Q(rate__gt=0), name="planned_rate_over_zero"),
        ]


class Period(models.Model):
    """A month of the billing zone. `version` counts how often it was closed; a month without a row is open."""

    class State(models.TextChoices):
        OPEN = "open"
        CLOSED = "closed"

    name = models.CharField(max_length=7, primary_key=True)
    state = models.CharField(max_length=6, choices=State.choices, default=State.OPEN)
    version = models.PositiveIntegerField(default=0)


class PeriodVersion(models.Model):
    """One closing of a period: what was checked, why it was closed all the same, what the book said.

    `fingerprint` is the trial balance's. Only `reopened_*` are ever written afterwards, once.
    """

    id = models.AutoField(primary_key=True)
    period = models.ForeignKey(Period, on_delete=models.PROTECT, related_name="versions")
    version = models.PositiveIntegerField()
    closed_at = models.DateTimeField()
    closed_by = models.CharField(max_length=200)
    reason = models.TextField(blank=True, default="")
    checklist = models.JSONField()
    methods = models.JSONField(default=list)
    fingerprint = models.CharField(max_length=64)
    cost_nanos = models.BigIntegerField()
    charge_nanos = models.BigIntegerField()
    reopened_at = models.DateTimeField(null=True, blank=True)
    reopened_by = models.CharField(max_length=200, blank=True, default="")
    reopen_reason = models.TextField(blank=True, default="")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["period", "version"], name="period_version_once")]


class PeriodExport(models.Model):
    """The bytes of one format of one closing, kept as they were made; the database refuses any change."""

    id = models.AutoField(primary_key=True)
    version = models.ForeignKey(PeriodVersion, on_delete=models.PROTECT, related_name="exports")
    format = models.CharField(max_length=8)
    file_name = models.CharField(max_length=100)
    rows = models.PositiveIntegerField()
    sha256 = models.CharField(max_length=64)
    content = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["version", "format"], name="period_export_once")]


class StatementIssue(models.Model):
    """A tenant's statement of one closing: its number has no gap, its lines are those of that instant.

    `supersedes` is the number of the statement of the period's version before.
    """

    id = models.AutoField(primary_key=True)
    version = models.ForeignKey(PeriodVersion, on_delete=models.PROTECT, related_name="statements")
    tenant_slug = models.CharField(max_length=63)
    number = models.PositiveIntegerField()
    supersedes = models.PositiveIntegerField(null=True, blank=True)
    charge_nanos = models.BigIntegerField()
    cost_nanos = models.BigIntegerField()
    lines = models.JSONField()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["tenant_slug", "number"], name="statement_number_once"),
            models.UniqueConstraint(fields=["version", "tenant_slug"], name="statement_once_a_version"),
        ]


class Proposal(models.Model):
    """A posting that one person makes and another one checks: an adjustment, a credit note, a variance of the bridge.

    `lines` are `{debit, credit, nanos}` by account code; the event that posts them is known by `event_key`.
    """

    class Kind(models.TextChoices):
        ADJUSTMENT = "adjustment"
        CREDIT_NOTE = "credit_note"
        VARIANCE = "variance"

    class State(models.TextChoices):
        PROPOSED = "proposed"
        POSTED = "posted"
        REJECTED = "rejected"

    id = models.BigAutoField(primary_key=True)
    kind = models.CharField(max_length=12, choices=Kind.choices)
    period = models.CharField(max_length=7)
    tenant_slug = models.CharField(max_length=63, blank=True, default="")
    step = models.CharField(max_length=40, blank=True, default="")
    spread = models.CharField(max_length=12, blank=True, default="")
    amount_nanos = models.BigIntegerField()
    lines = models.JSONField()
    event_key = models.CharField(max_length=200)
    reason = models.TextField()
    state = models.CharField(max_length=8, choices=State.choices, default=State.PROPOSED)
    made_at = models.DateTimeField()
    made_by = models.CharField(max_length=200)
    decided_at = models.DateTimeField(null=True, blank=True)
    decided_by = models.CharField(max_length=200, blank=True, default="")
    decision_reason = models.TextField(blank=True, default="")
    event = models.ForeignKey(LedgerEvent, on_delete=models.PROTECT, null=True, blank=True, related_name="+")

    class Meta:
        constraints = [
            models.CheckConstraint(condition=~Q(made_by=F("decided_by")), name="proposal_checked_by_another"),
            models.CheckConstraint(
                condition=~Q(state="posted") | (~Q(decided_by="") & Q(event__isnull=False)),
                name="proposal_posted_by_a_checker",
            ),
            models.UniqueConstraint(
                fields=["event_key"], condition=~Q(state="rejected"), name="proposal_once_while_not_rejected"
            ),
        ]


class BalanceFold(models.Model):
    """How far transfers are folded into `BalanceSum`: every transfer up to `through_id` is in a sum. One row, id 1."""

    id = models.SmallIntegerField(primary_key=True, default=1)
    through_id = models.BigIntegerField(default=0)
    folded_at = models.DateTimeField(null=True)


class BalanceSum(models.Model):
    """Debits and credits of an account in a period, of the transfers that are folded."""

    account = models.ForeignKey(Account, on_delete=models.PROTECT, related_name="+")
    period = models.CharField(max_length=7)
    debit_nanos = models.BigIntegerField()
    credit_nanos = models.BigIntegerField()
    debits = models.BigIntegerField()
    credits = models.BigIntegerField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["account", "period"], name="balance_sum_once")]


class ExportJob(models.Model):
    """An export that is made by a worker: asked for, running, done with its bytes, or failed with a sentence."""

    class State(models.TextChoices):
        WAITING = "waiting"
        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"

    id = models.BigAutoField(primary_key=True)
    period = models.CharField(max_length=7)
    format = models.CharField(max_length=8)
    state = models.CharField(max_length=7, choices=State.choices, default=State.WAITING)
    rows_done = models.PositiveIntegerField(default=0)
    rows_total = models.PositiveIntegerField(default=0)
    asked_at = models.DateTimeField()
    asked_by = models.CharField(max_length=200)
    started_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    problem = models.CharField(max_length=400, blank=True, default="")
    file_name = models.CharField(max_length=100, blank=True, default="")
    sha256 = models.CharField(max_length=64, blank=True, default="")
    content = models.BinaryField(null=True)
