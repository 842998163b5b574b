"""`/v1/files` and `/v1/batches`, with a tenant's API key and errors in OpenAI's shape. Uploads have their own door."""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec
from django.core.exceptions import ValidationError
from django.db import InterfaceError, OperationalError
from django.db.models import QuerySet
from django.http import Http404, StreamingHttpResponse
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import APIException, AuthenticationFailed, NotAuthenticated
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.audit.actors import Actor
from controlplane.jobs import batch_actions, storage
from controlplane.jobs.actions import KeyReused
from controlplane.jobs.batch_actions import BatchOrder, uuid_of
from controlplane.jobs.key_authentication import KeyAuthentication, actor_of_key
from controlplane.jobs.models import Batch, StoredFile
from controlplane.jobs.openai_form import batch_form, error_form, file_form, page_form
from controlplane.tenants.models import ApiKey, Tenant

log = logging.getLogger(__name__)

PAGE: Final = 20
PAGE_MOST: Final = 100
FILE_PAGE_MOST: Final = 10_000


class WhateverIsAccepted(BaseContentNegotiation):
    """Clients ask for a file's bytes with an Accept of their own; each address has one form."""

    def select_parser(self, request: Request, parsers: Any) -> Any:
        return parsers[0]

    def select_renderer(self, request: Request, renderers: Any, format_suffix: Any = None) -> Any:
        return renderers[0], renderers[0].media_type


class OfAKey(BasePermission):
    """A key in force; that of a suspended tenant may still read."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        return isinstance(request.auth, ApiKey)


def openai_error(error: Exception, context: dict[str, Any]) -> Response:
    """DRF's exception handler for this surface. What it does not know is raised again: a fault of ours."""
    if isinstance(error, ValidationError):
        messages = error.message_dict if hasattr(error, "error_dict") else {"": error.messages}
        param, texts = next(iter(messages.items()))
        form = error_form(" ".join(texts), kind="invalid_request_error", code="invalid_value", param=param or None)
        return Response(form, status=400)
    if isinstance(error, KeyReused):
        return Response(error_form(str(error), kind="invalid_request_error", code="idempotency_key_reused"), status=422)
    if isinstance(error, FileNotFoundError):
        log.error("a file is lost: %s", error)
        return Response(error_form(storage.LOST, kind="server_error", code="file_lost"), status=404)
    if isinstance(error, storage.StorageError):
        log.error("a file was not sent: %s", error)
        form = error_form("The file store does not answer. Try again later.", kind="server_error", code="storage")
        return Response(form, status=503)
    if isinstance(error, OperationalError | InterfaceError):
        log.error("the database does not answer: %s", error)
        form = error_form("The control plane cannot do this now. Try again.", kind="server_error", code="busy")
        return Response(form, status=503)
    if isinstance(error, Http404):
        return Response(error_form(str(error), kind="invalid_request_error", code="not_found"), status=404)
    if isinstance(error, AuthenticationFailed | NotAuthenticated):
        form = error_form(str(error.detail), kind="authentication_error", code="invalid_api_key")
        return Response(form, status=401, headers={"WWW-Authenticate": "Bearer"})
    if isinstance(error, APIException):
        form = error_form(str(error.detail), kind="invalid_request_error", code=error.default_code)
        return Response(form, status=error.status_code)
    raise error


@extend_schema(exclude=True)
class OpenAIView(APIView):
    """A view of this surface: it guards itself by the key, whose tenant bounds everything it reads."""

    public = True
    authentication_classes: tuple[type[BaseAuthentication], ...] = (KeyAuthentication,)
    permission_classes = (OfAKey,)
    content_negotiation_class = WhateverIsAccepted

    def get_exception_handler(self) -> Any:
        return openai_error

    @property
    def key(self) -> ApiKey:
        assert isinstance(self.request.auth, ApiKey)
        return self.request.auth

    @property
    def tenant(self) -> Tenant:
        return self.key.tenant

    @property
    def actor(self) -> Actor:
        return actor_of_key(self.key, getattr(self.request._request, "request_id", ""))

    def file(self, file_id: str) -> StoredFile:
        found = uuid_of(file_id, "file-")
        row = None if found is None else files_of(self.tenant).filter(uuid=found).first()
        if row is None:
            raise Http404(f"You have no file {file_id!r}.")
        return row

    def batch(self, batch_id: str) -> Batch:
        found = uuid_of(batch_id, "batch_")
        row = None if found is None else batches_of(self.tenant).filter(uuid=found).first()
        if row is None:
            raise Http404(f"You have no batch {batch_id!r}.")
        return row

    def limit(self, usual: int, most: int) -> int:
        text = self.request.query_params.get("limit", str(usual))
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
            raise ValidationError({"limit": f"Ask for 1 to {most} rows."})
        return int(text)


def files_of(tenant: Tenant) -> QuerySet[StoredFile]:
    """The files a tenant sees: complete, not deleted, not yet expired."""
    rows = StoredFile.objects.filter(tenant=tenant, ready_at__isnull=False, deleted_at__isnull=True)
    return rows.filter(expires_at__gt=timezone.now())


def batches_of(tenant: Tenant) -> QuerySet[Batch]:
    related = ("job__pool__model", "input_file", "output_file", "error_file")
    return Batch.objects.filter(tenant=tenant).select_related(*related)


class FilesView(OpenAIView):
    def get(self, request: Request) -> Response:
        """The tenant's files, newest first; `after` is the id of the last one seen."""
        rows = files_of(self.tenant).order_by("-id")
        if purpose := request.query_params.get("purpose"):
            rows = rows.filter(purpose=purpose)
        if after := request.query_params.get("after"):
            rows = rows.filter(pk__lt=self.file(after).pk)
        limit = self.limit(FILE_PAGE_MOST, FILE_PAGE_MOST)
        found = list(rows[: limit + 1])
        return Response(page_form([file_form(row) for row in found[:limit]], len(found) > limit))


class FileView(OpenAIView):
    def get(self, request: Request, file_id: str) -> Response:
        return Response(file_form(self.file(file_id)))

    def delete(self, request: Request, file_id: str) -> Response:
        row = batch_actions.delete_file(tenant=self.tenant, file_id=file_id, actor=self.actor, now=timezone.now())
        if row is None:
            raise Http404(f"You have no file {file_id!r}.")
        return Response({"id": file_id, "object": "file", "deleted": True})


class FileContentView(OpenAIView):
    def get(self, request: Request, file_id: str) -> StreamingHttpResponse:
        """The bytes of a file, streamed."""
        row = self.file(file_id)
        storage.look_for(row.path)
        response = StreamingHttpResponse(storage.stream(row.path), content_type="application/octet-stream")
        response["Content-Length"] = str(row.size_bytes)
        response["Content-Disposition"] = "attachment"
        return response


class _BatchBody(msgspec.Struct, forbid_unknown_fields=False):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchesView(OpenAIView):
    def get(self, request: Request) -> Response:
        """The tenant's batches, newest first; `after` is the id of the last one seen."""
        rows = batches_of(self.tenant).order_by("-id")
        if after := request.query_params.get("after"):
            rows = rows.filter(pk__lt=self.batch(after).pk)
        limit = self.limit(PAGE, PAGE_MOST)
        found = list(rows[: limit + 1])
        return Response(page_form([batch_form(row) for row in found[:limit]], len(found) > limit))

    def post(self, request: Request) -> Response:
        """Takes a batch; its file is checked by a worker, and errors stand in the batch with their line numbers."""
        try:
            body = msgspec.convert(request.data, _BatchBody)
        except msgspec.ValidationError as error:
            raise ValidationError(f"The body cannot be used: {error}.") from None
        batch = batch_actions.submit_batch(
            tenant=self.tenant,
            key=self.key,
            order=BatchOrder(
                input_file_id=body.input_file_id,
                endpoint=body.endpoint,
                completion_window=body.completion_window,
                metadata=body.metadata,
            ),
            actor=self.actor,
            now=timezone.now(),
            idempotency_key=request.headers.get("Idempotency-Key") or None,
        )
        return Response(batch_form(batches_of(self.tenant).get(pk=batch.pk)))


class BatchView(OpenAIView):
    def get(self, request: Request, batch_id: str) -> Response:
        return Response(batch_form(self.batch(batch_id)))


class BatchCancelView(OpenAIView):
    def post(self, request: Request, batch_id: str) -> Response:
        batch = self.batch(batch_id)
        batch_actions.cancel_batch(batch_id=batch.pk, actor=self.actor, now=timezone.now())
        return Response(batch_form(self.batch(batch_id)))
