"""REST of the months' reconciliations as a list: what each bridge leaves, and whether its steps add up."""

from collections.abc import Sequence
from typing import Any

from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotFound
from rest_framework.generics import ListAPIView
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.core.money import format_nanos
from controlplane.ledger.bridging import BridgeReport, bridge_reports
from controlplane.ledger.late_invoices import tolerance_of
from controlplane.ledger.models import Invoice
from controlplane.ledger.period_queries import Month, months
from controlplane.ledger.reconciliation import month_window
from controlplane.ledger.variances import booked_by_period
from controlplane.tenants.queries import installation
from controlplane.web.cursor import CursorPages
from controlplane.web.pagination import BadCursor, sorted_page

STATES = ("running", "open", "closed")


class MonthPages(CursorPages):
    """Pages of months: a page reads the invoice lines of each, so it holds two years at most."""

    page_size = 12
    max_page_size = 24

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> list[Any] | None:
        self.base_url = request.build_absolute_uri()
        cursor, limit = request.query_params.get(self.cursor_query_param), self.get_page_size(request)
        try:
            self.found = sorted_page(queryset, _newest_first, cursor=cursor, limit=limit or self.page_size)
        except BadCursor as error:
            raise NotFound(self.invalid_cursor_message) from error
        return self.found.rows


def _newest_first(month: Month) -> tuple[int]:
    return (-int(month.name.replace("-", "")),)


class ReconciliationQuerySerializer(serializers.Serializer):
    """Which months."""

    state = serializers.ChoiceField(STATES, required=False)


class ListedStepSerializer(serializers.Serializer):
    """A residual of the bridge: positive: the invoices have more than the book. `booked` is what of it is posted."""

    step = serializers.CharField()
    amount = serializers.CharField()
    lines = serializers.IntegerField()
    booked = serializers.CharField()


class ReconciliationRowSerializer(serializers.Serializer):
    """A month from its book to its current invoices; amounts are exact decimal text.

    `residual` is what no step names, `sums_to_zero` whether that is nothing; null: there is no invoice to reconcile
    with. `open` is what the invoices have beyond the book and its booked variances, `within_tolerance` whether that may
    stay; null likewise. `unpriced_us`: slot time whose cost is unknown, in no sum.
    """

    period = serializers.CharField()
    state = serializers.ChoiceField(STATES)
    version = serializers.IntegerField()
    currency = serializers.CharField()
    book = serializers.CharField()
    steps = ListedStepSerializer(many=True)
    invoice = serializers.CharField(allow_null=True)
    invoices = serializers.ListField(child=serializers.IntegerField())
    difference = serializers.CharField(allow_null=True)
    residual = serializers.CharField(allow_null=True)
    sums_to_zero = serializers.BooleanField(allow_null=True)
    booked = serializers.CharField()
    open = serializers.CharField(allow_null=True)
    tolerance = serializers.CharField(allow_null=True)
    within_tolerance = serializers.BooleanField(allow_null=True)
    unpriced_us = serializers.IntegerField()


class ReconciliationsView(ListAPIView):
    """Months with the residuals of their bridges, the newest first. One month in full, with estimates and meters, is at
    its own address.
    """

    read_permission = "finance.read"
    write_permission = "finance.write"
    serializer_class = ReconciliationRowSerializer
    pagination_class = MonthPages
    filter_backends = ()
    queryset = Invoice.objects.none()

    @extend_schema(
        operation_id="reconciliations",
        parameters=[ReconciliationQuerySerializer],
        responses=ReconciliationRowSerializer(many=True),
    )
    def get(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        asked = ReconciliationQuerySerializer(data=request.query_params)
        asked.is_valid(raise_exception=True)
        state = asked.validated_data.get("state")
        wanted = [month for month in months(timezone.now()) if state in (None, month.state)]
        paginator = self.paginator
        assert paginator is not None, "the class names one"
        page = paginator.paginate_queryset(wanted, request, self)  # type: ignore[arg-type]  # months are in memory
        return self.get_paginated_response(reconciliations_json(page or []))


def reconciliations_json(page: Sequence[Month]) -> list[dict[str, Any]]:
    """Months as the list tells them; a fixed number of statements."""
    book = installation()
    windows = {month.name: month_window(month.name, book.billing_zone) for month in page}
    reports, booked = bridge_reports(windows, book.billing_zone), booked_by_period([*windows])
    return [_row(month, book.currency, reports[month.name], booked[month.name]) for month in page]


def _row(month: Month, currency: str, bridge: BridgeReport, booked: dict[str, int]) -> dict[str, Any]:
    open_nanos, tolerance = bridge.difference_nanos - sum(booked.values()), tolerance_of(bridge)
    against = {
        "invoice": format_nanos(bridge.invoice_nanos), "difference": format_nanos(bridge.difference_nanos),
        "residual": format_nanos(bridge.unexplained_nanos), "sums_to_zero": bridge.closes,
        "open": format_nanos(open_nanos), "tolerance": format_nanos(tolerance),
        "within_tolerance": bridge.closes and abs(open_nanos) <= tolerance,
    }  # fmt: skip
    return {
        "period": month.name, "state": month.state, "version": month.version.version if month.version else 0,
        "currency": currency, "book": format_nanos(bridge.book_nanos),
        "steps": [
            {"step": step.name, "amount": format_nanos(step.nanos), "lines": step.lines,
             "booked": format_nanos(booked.get(step.name, 0))}
            for step in bridge.steps
        ],
        **(against if bridge.invoices else dict.fromkeys(against)), "invoices": [row.pk for row in bridge.invoices],
        "booked": format_nanos(sum(booked.values())), "unpriced_us": bridge.unpriced_us,
    }  # fmt: skip
