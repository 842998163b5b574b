"""REST of provider invoices: handed over as a form, looked through or taken, withdrawn; saved mappings."""

from typing import Any

from django.core.exceptions import ValidationError
from django.shortcuts import get_object_or_404
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter, PolymorphicProxySerializer, extend_schema
from rest_framework import serializers, status
from rest_framework.filters import OrderingFilter
from rest_framework.generics import GenericAPIView
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.audit.actors import actor_of
from controlplane.core.period import format_utc
from controlplane.ledger import invoice_preview
from controlplane.ledger.invoice_columns import FORMATS, UnknownColumns
from controlplane.ledger.invoice_mappings import Columns, save_mapping
from controlplane.ledger.invoice_reading import FileRefused
from controlplane.ledger.invoice_uploads import check_content, check_size, checked_month
from controlplane.ledger.invoices import (
    ExchangeRate,
    Imported,
    LinesRefused,
    import_invoice,
    imported_json,
    refused_json,
    saved_mapping,
    withdraw_invoice,
)
from controlplane.ledger.late_invoices import landings, lands_in
from controlplane.ledger.models import Invoice, InvoiceMapping
from controlplane.ledger.reconciliation import month_window
from controlplane.tenants.queries import installation
from controlplane.tenants.rest import ReasonSerializer, checked, writes
from controlplane.web.api import PROBLEM_TYPE
from controlplane.web.openapi import problem


def _refused(error: ValidationError) -> serializers.ValidationError:
    return serializers.ValidationError(error.message_dict if hasattr(error, "error_dict") else error.messages)


class InvoiceFileSerializer(serializers.Serializer):
    """A provider's file for a month. With `preview` nothing is stored."""

    file = serializers.FileField()
    period = serializers.CharField(max_length=7, help_text="the month it is for, such as 2026-10")
    format = serializers.ChoiceField(["auto", *FORMATS], required=False, default="auto")
    mapping = serializers.CharField(
        max_length=63, required=False, allow_blank=True, default="", help_text="name of a saved mapping"
    )
    currency = serializers.CharField(
        max_length=3, required=False, allow_blank=True, default="", help_text="for a file that names none"
    )
    rate = serializers.CharField(
        max_length=40, required=False, allow_blank=True, default="", help_text="book currency for one of the file's"
    )
    rate_day = serializers.CharField(max_length=10, required=False, allow_blank=True, default="")
    preview = serializers.BooleanField(required=False, default=False)


class InvoiceSerializer(serializers.Serializer):
    """An invoice that was taken. `late_in`: the month in whose books it lands, null when it is its own."""

    id = serializers.IntegerField()
    period = serializers.CharField()
    file = serializers.CharField()
    sha256 = serializers.CharField()
    format = serializers.CharField()
    mapping = serializers.CharField(allow_null=True)
    currency = serializers.CharField()
    exchange_rate = serializers.CharField(allow_null=True)
    exchange_date = serializers.DateField(allow_null=True)
    lines = serializers.IntegerField()
    outside_period = serializers.IntegerField()
    state = serializers.CharField()
    imported_at = serializers.DateTimeField()
    imported_by = serializers.CharField()
    late_in = serializers.CharField(allow_null=True)


class InvoiceTotalsSerializer(serializers.Serializer):
    billed = serializers.CharField()
    effective = serializers.CharField(allow_null=True)


class SumsSerializer(serializers.Serializer):
    """Exact sums as text."""

    totals = InvoiceTotalsSerializer()
    by_category = serializers.DictField(child=serializers.CharField())


class InvoiceDetailSerializer(InvoiceSerializer, SumsSerializer):
    """An invoice with its exact sums."""

    by_service = serializers.DictField(child=serializers.CharField())


class RefusedLineSerializer(serializers.Serializer):
    line = serializers.IntegerField()
    reason = serializers.CharField()


class ImportedSerializer(SumsSerializer):
    """What was taken of a file; `repeated` when the same file was there already."""

    invoice = serializers.IntegerField()
    repeated = serializers.BooleanField()
    format = serializers.CharField()
    lines = serializers.IntegerField()
    refused = RefusedLineSerializer(many=True)
    currency = serializers.CharField()
    outside_period = serializers.IntegerField()
    repeated_ids = serializers.ListField(child=serializers.CharField())
    late_in = serializers.CharField(allow_null=True)
    by_service = serializers.DictField(child=serializers.CharField())


class PreviewLineSerializer(serializers.Serializer):
    """A line as it would be read; amounts and quantities are decimal text. `starts` is a day or an instant."""

    line = serializers.IntegerField()
    day = serializers.DateField()
    inside_period = serializers.BooleanField()
    starts = serializers.CharField()
    billed = serializers.CharField()
    currency = serializers.CharField(allow_blank=True)
    category = serializers.CharField()
    effective = serializers.CharField(allow_null=True)
    quantity = serializers.CharField(allow_null=True)
    provider = serializers.CharField(allow_blank=True)
    account = serializers.CharField(allow_blank=True)
    sku = serializers.CharField(allow_blank=True)
    region = serializers.CharField(allow_blank=True)
    service = serializers.CharField(allow_blank=True)
    description = serializers.CharField(allow_blank=True)
    unit = serializers.CharField(allow_blank=True)
    line_id = serializers.CharField(allow_blank=True)


class InvoicePreviewSerializer(SumsSerializer):
    """What a file would be read as; `first` are its first lines."""

    format = serializers.CharField()
    lines = serializers.IntegerField()
    outside_period = serializers.IntegerField()
    currencies = serializers.ListField(child=serializers.CharField())
    decimal_mark = serializers.CharField(allow_null=True, allow_blank=True)
    day_order = serializers.CharField(allow_null=True, allow_blank=True)
    columns = serializers.ListField(child=serializers.CharField(allow_blank=True))
    refused = RefusedLineSerializer(many=True)
    refused_more = serializers.IntegerField()
    first = PreviewLineSerializer(many=True)


def _invoice_json(row: Invoice, late_in: str | None) -> dict[str, Any]:
    return {
        "id": row.pk, "period": row.period, "file": row.file_name, "sha256": row.file_sha256, "format": row.format,
        "mapping": row.mapping.name if row.mapping else None, "currency": row.currency,
        "exchange_rate": None if row.exchange_rate is None else f"{row.exchange_rate.normalize():f}",
        "exchange_date": row.exchange_date.isoformat() if row.exchange_date else None, "lines": row.lines_count,
        "outside_period": row.outside_period, "state": row.state, "imported_at": format_utc(row.imported_at),
        "imported_by": row.imported_by, "late_in": late_in,
    }  # fmt: skip


class InvoicesView(GenericAPIView):
    """Invoices, the latest first; a POST takes a file, every line of it or none. The same file counts once a month."""

    read_permission = "finance.read"
    write_permission = "finance.write"
    parser_classes = [MultiPartParser]
    queryset = Invoice.objects.select_related("mapping")
    serializer_class = InvoiceSerializer
    filter_backends = (OrderingFilter,)
    ordering_fields = ("id", "period", "imported_at")
    ordering = ("-id",)

    @extend_schema(
        operation_id="invoices_list",
        responses=InvoiceSerializer(many=True),
        parameters=[OpenApiParameter("period", str)],
    )
    def get(self, request: Request) -> Response:
        rows = self.get_queryset()
        if period := request.query_params.get("period"):
            rows = rows.filter(period=period)
        invoices = self.paginate_queryset(rows) or []
        late = landings(invoices)
        return self.get_paginated_response([_invoice_json(row, late.get(row.pk)) for row in invoices])

    @extend_schema(
        request={"multipart/form-data": InvoiceFileSerializer},
        responses={
            200: PolymorphicProxySerializer(
                "InvoiceKnownOrPreviewed", [ImportedSerializer, InvoicePreviewSerializer], resource_type_field_name=None
            ),
            201: ImportedSerializer,
            **problem(
                422, "Lines that cannot be read, in `refused`; or the Idempotency-Key was used with another file."
            ),
        },
    )
    @writes
    def post(self, request: Request) -> Response:
        given = checked(InvoiceFileSerializer, request)
        try:
            _check_file(given)
            answer = _look(given) if given["preview"] else _take(given, request)
        except ValidationError as error:
            raise _refused(error) from error
        except (FileRefused, UnknownColumns) as error:
            raise serializers.ValidationError({"file": [str(error)]}) from error
        return answer


def _check_file(given: dict[str, Any]) -> None:
    checked_month(given["period"])
    check_size(given["file"])
    check_content(given["file"].read())
    given["file"].seek(0)
    try:
        saved_mapping(given["mapping"])
    except ValueError as error:
        raise ValidationError({"mapping": str(error)}) from None


def _look(given: dict[str, Any]) -> Response:
    zone = installation().billing_zone
    found = invoice_preview.preview(
        given["file"], window=month_window(given["period"], zone), zone=zone, format=given["format"],
        columns=saved_mapping(given["mapping"])[1],
    )  # fmt: skip
    return Response(invoice_preview.to_json(found))


def _take(given: dict[str, Any], request: Request) -> Response:
    try:
        exchange = ExchangeRate.of_text(given["rate"], given["rate_day"]) if given["rate"] else None
    except ValueError as error:
        raise ValidationError({"rate": f"{error}."}) from None
    try:
        done = import_invoice(
            given["file"], file_name=given["file"].name or "invoice.csv", period=given["period"],
            actor=actor_of(request), now=timezone.now(), format=given["format"], mapping=given["mapping"],
            currency=given["currency"], exchange=exchange,
        )  # fmt: skip
    except LinesRefused as error:
        body = {"type": "about:blank#lines_refused", "title": f"{error}.", "status": 422, "code": "lines_refused"}
        return Response({**body, **refused_json(error)}, status=422, content_type=PROBLEM_TYPE)
    return Response(imported_json(done), status=status.HTTP_200_OK if done.repeated else status.HTTP_201_CREATED)


class InvoiceView(APIView):
    """One invoice with its exact sums."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(responses=InvoiceDetailSerializer)
    def get(self, request: Request, pk: int) -> Response:
        row = get_object_or_404(Invoice.objects.select_related("mapping"), pk=pk)
        sums = imported_json(Imported(row, repeated=False))
        parts = {name: sums[name] for name in ("totals", "by_category", "by_service")}
        return Response(_invoice_json(row, sums["late_in"]) | parts)


class WithdrawInvoiceView(APIView):
    """An invoice that was taken by mistake counts no longer; not once its month is closed. Again changes nothing."""

    read_permission = "finance.read"
    write_permission = "finance.write"

    @extend_schema(request=ReasonSerializer, responses=InvoiceSerializer)
    @writes
    def post(self, request: Request, pk: int) -> Response:
        get_object_or_404(Invoice, pk=pk)
        reason = checked(ReasonSerializer, request)["reason"]
        try:
            row = withdraw_invoice(pk, actor=actor_of(request), now=timezone.now(), reason=reason)
        except ValidationError as error:
            raise _refused(error) from error
        return Response(_invoice_json(row, lands_in(row) or None))


class MappingSerializer(serializers.Serializer):
    """How a provider's own CSV is read: the headers of each fact, the first found counts."""

    name = serializers.SlugField(max_length=63)
    columns = serializers.DictField(child=serializers.ListField(child=serializers.CharField(max_length=300)))
    categories = serializers.DictField(child=serializers.CharField(max_length=12), required=False, default=dict)
    provider_name = serializers.CharField(max_length=63, required=False, allow_blank=True, default="")
    fixed_currency = serializers.CharField(max_length=3, required=False, allow_blank=True, default="")
    decimal_mark = serializers.ChoiceField(["", "point", "comma"], required=False, default="")
    day_order = serializers.ChoiceField(["", "month_first", "day_first"], required=False, default="")


class SavedMappingSerializer(MappingSerializer):
    """A mapping as it was saved last."""

    version = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    created_by = serializers.CharField()


def _mapping_json(row: InvoiceMapping) -> dict[str, Any]:
    return {
        "name": row.name, "columns": row.columns, "categories": row.categories, "provider_name": row.provider_name,
        "fixed_currency": row.fixed_currency, "decimal_mark": row.decimal_mark, "day_order": row.day_order,
        "version": row.version, "created_at": format_utc(row.created_at), "created_by": row.created_by,
    }  # fmt: skip


class InvoiceMappingsView(GenericAPIView):
    """Saved mappings; a POST saves one under its name, over the one before."""

    read_permission = "finance.read"
    write_permission = "finance.write"
    queryset = InvoiceMapping.objects.all()
    serializer_class = SavedMappingSerializer
    filter_backends = (OrderingFilter,)
    ordering_fields = ("name", "id")
    ordering = ("name",)

    @extend_schema(responses=SavedMappingSerializer(many=True))
    def get(self, request: Request) -> Response:
        page = self.paginate_queryset(self.get_queryset()) or []
        return self.get_paginated_response([_mapping_json(row) for row in page])

    @extend_schema(request=MappingSerializer, responses={200: SavedMappingSerializer, 201: SavedMappingSerializer})
    @writes
    def post(self, request: Request) -> Response:
        given = checked(MappingSerializer, request)
        name = given.pop("name")
        given["fixed_currency"] = given["fixed_currency"].upper()
        try:
            row = save_mapping(name, Columns(**given), actor=actor_of(request), now=timezone.now())
        except ValidationError as error:
            raise _refused(error) from error
        return Response(_mapping_json(row), status=status.HTTP_201_CREATED if row.version == 1 else status.HTTP_200_OK)
