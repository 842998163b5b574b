"""What `reconciliation.to_json` answers, as the REST description tells it. Money is exact decimal text."""

from typing import Any

from drf_spectacular.utils import inline_serializer
from rest_framework.serializers import (
    BooleanField,
    CharField,
    DateTimeField,
    FloatField,
    IntegerField,
    ListField,
    Serializer,
)


def _rows(name: str, **fields: Any) -> Serializer:
    return inline_serializer(name, fields, many=True)


_SKU = dict.fromkeys(("provider", "account", "sku", "region", "day"), CharField)


def _of_sku(name: str, **fields: Any) -> Serializer:
    return _rows(name, **{key: kind() for key, kind in _SKU.items()}, **fields)


class ReconciledEstimatesSerializer(Serializer):
    """Estimates at admission beside what the requests took; `bias` null: nothing was estimated."""

    records = IntegerField()
    requests = IntegerField()
    unknown_requests = IntegerField()
    rows = _rows(
        "EstimatedRow",
        **{"tenant": CharField(), "class": CharField()},
        estimated_gpu_us=IntegerField(),
        actual_gpu_us=IntegerField(),
        bias=FloatField(allow_null=True),
        admission_factor=FloatField(),
        estimated=CharField(allow_null=True),
        actual=CharField(),
    )


class ReconciledMetersSerializer(Serializer):
    """Slot-minutes by whether meter and requests agree, and where they do not; `heard` is a share of 1."""

    slot_minutes = IntegerField()
    agree = IntegerField()
    differs = IntegerField()
    unknown = IntegerField()
    gaps = _rows(
        "ReportGap",
        agent=CharField(),
        epoch=IntegerField(),
        first_seq=IntegerField(),
        last_seq=IntegerField(allow_null=True),
        reason=CharField(allow_blank=True),
        records=IntegerField(allow_null=True),
        at=DateTimeField(),
    )
    coverage = _rows("AgentCoverage", agent=CharField(), heard=FloatField(), minutes=IntegerField())
    slot_days = _rows(
        "SlotDay",
        pool=CharField(),
        slot=CharField(),
        day=DateTimeField(),
        differs=IntegerField(),
        unknown=IntegerField(),
        requests_us=IntegerField(),
        busy_us=IntegerField(),
    )


class ReconciledBridgeSerializer(Serializer):
    """From the book to the invoices, step by step; `residual` is 0.00 unless a step is missing."""

    book = CharField()
    steps = _rows("BridgeStep", step=CharField(), amount=CharField(), lines=IntegerField(), booked=CharField())
    invoice = CharField()
    difference = CharField()
    residual = CharField()
    open = CharField()
    tolerance = CharField()
    within_tolerance = BooleanField()
    unpriced_us = IntegerField()
    invoices = _rows(
        "BridgedInvoice",
        id=IntegerField(),
        file=CharField(),
        currency=CharField(),
        lines=IntegerField(),
        exchange_rate=CharField(allow_null=True),
    )
    matched = _of_sku(
        "MatchedLine",
        book_quantity=CharField(),
        book=CharField(),
        invoice_quantity=CharField(),
        invoice=CharField(),
        price_variance=CharField(),
        quantity_variance=CharField(),
    )
    unmatched_book = _of_sku("UnmatchedBook", amount=CharField())
    unmatched_invoice = _of_sku("UnmatchedInvoice", amount=CharField())


class ReconciliationSerializer(Serializer):
    """A month. `late`: invoices of closed months that came after their closing."""

    period = CharField()
    zone = CharField()
    currency = CharField()
    since = DateTimeField()
    until = DateTimeField()
    estimates = ReconciledEstimatesSerializer()
    meters = ReconciledMetersSerializer()
    late = _rows(
        "LateMonth",
        period=CharField(),
        invoices=ListField(child=IntegerField()),
        invoice=CharField(),
        booked=CharField(),
        open=CharField(),
        tolerance=CharField(),
        settled=BooleanField(),
    )
    bridge = ReconciledBridgeSerializer()
