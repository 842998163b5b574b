"""REST of the live figures: how every contract stands, and the alerts that are open."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import Http404
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework.authentication import SessionAuthentication
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.access.authentication import TokenAuthentication
from controlplane.contracts.models import Contract
from controlplane.contracts.queries import visible_contracts
from controlplane.core.period import from_us
from controlplane.jobs.key_authentication import KeyAuthentication
from controlplane.live import alerting, contracts, deadlines, readings
from controlplane.live.answers import OpenAlertsSerializer, RequestStorySerializer, SloStatusSerializer
from controlplane.live.in_force import in_force
from controlplane.live.refusal_lookup import refused_minute
from controlplane.live.request_story import as_json, visible_story
from controlplane.tenants.queries import visible_tenants
from controlplane.usage.retirement import ArchiveChanged
from controlplane.web.openapi import problem
from controlplane.web.renderers import RowsRenderer


def night_json(contract: Contract, night: deadlines.Night) -> dict[str, Any]:
    """A batch contract over the night that matters now."""
    result = night.result
    return {
        "contract": contract.slug,
        "version": night.version.number,
        "target": night.version.target_ppm / contracts.PPM,
        "night": night.night.admission.label,
        "due": from_us(night.night.due_us).isoformat(),
        "jobs": result.jobs,
        "finished_in_time": result.finished_in_time,
        "waited_too_long": result.waited_too_long,
        "share": None if result.share is None else float(result.share),
        "verdict": str(result.verdict),
        "unknown_reason": None if result.unknown_reason is None else str(result.unknown_reason),
        "met": {"met": True, "missed": False}.get(str(result.verdict)),
        "state": night.grade,
    }


class SloStatus(APIView):
    """Every contract that the caller may see: verdict, three populations, budget left, burn and its alerts."""

    renderer_classes = (RowsRenderer,)
    read_permission = "slo.read"

    @extend_schema(operation_id="slo_status", responses=SloStatusSerializer)
    def get(self, request: Request) -> Response:
        now = timezone.now()
        rows = in_force(now, visible_contracts(request.user))
        evaluations, nights = contracts.evaluate(rows, now), deadlines.evaluate(rows, now)
        said = []
        for row in rows:
            if row.contract.pk in evaluations:
                said.append(contracts.as_json(evaluations[row.contract.pk]))
            elif row.contract.pk in nights:
                said.append(night_json(row.contract, nights[row.contract.pk]))
        return Response({"at": now.isoformat(), "results": said})


class NotKnown(APIException):
    status_code = 503
    default_detail = "The file of that day cannot be read: whether there was such a request is not known. Ask on-call."
    default_code = "not_known"


class RequestExplanation(APIView):
    """One request: how it ended, or why it was refused; where no explanation was kept, what its minute counted."""

    authentication_classes = (TokenAuthentication, KeyAuthentication, SessionAuthentication)
    read_permission = "request.read"

    @extend_schema(
        operation_id="request_explanation",
        responses={
            200: RequestStorySerializer,
            **problem(404, "Nothing is known of it, or it is not the caller's to see."),
            **problem(503, NotKnown.default_detail),
        },
    )
    def get(self, request: Request, request_id: UUID) -> Response:
        now, tenants = timezone.now(), visible_tenants(request.user)
        try:
            story = visible_story(request_id, tenants, now)
        except ArchiveChanged as error:
            raise NotKnown from error
        if story is not None:
            return Response(as_json(story))
        found = refused_minute(request_id, tenants, now)
        if found is None:
            raise Http404("There is no such request.")
        return Response(found.as_json())


class Alerts(APIView):
    """Open alerts, loudest first."""

    read_permission = "alert.read"

    @extend_schema(operation_id="alerts", responses=OpenAlertsSerializer)
    def get(self, request: Request) -> Response:
        now = timezone.now()
        return Response({"at": now.isoformat(), "results": alerting.alert_rows(readings.read(now, with_lanes=False))})
