"""Rates and the double-entry book: columns and constraints. One row of `Transfer` balances by construction.

Event and transfer rows are never updated or deleted; the database refuses it for every role.
"""

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

    A withdrawn invoice counts nowhere and stays readable.
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
