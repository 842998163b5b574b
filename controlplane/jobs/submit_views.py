"""Handing over a file as a job, and what became of it: checked, refused with its lines, or running."""

from __future__ import annotations

import logging
import uuid
from typing import Final

from django.conf import settings
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache

from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.jobs import batch_actions, listing
from controlplane.jobs.batch_actions import BatchOrder
from controlplane.jobs.batch_import import ERRORS_MOST
from controlplane.jobs.forms import FIELD_OF, SubmitForm
from controlplane.jobs.models import Batch
from controlplane.jobs.openai_form import file_id
from controlplane.jobs.storage import StorageError
from controlplane.jobs.uploads import store
from controlplane.tenants.access import may, requires
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import sees_all_tenants, visible_tenants

log = logging.getLogger(__name__)

PAGE_FILE_BYTES_MOST: Final = 64 * 1024 * 1024
"""What a form takes: a larger file is sent with the client, as a stream."""


@requires("job.submit")
def job_new(request: HttpRequest) -> HttpResponseBase:
    """The form, and on POST the batch of the file that was sent."""
    first = visible_tenants(request.user).filter(state=Tenant.State.ACTIVE).first()
    if first is None:
        return render(request, "jobs/new.html", {"form": None, "nav_section": "jobs"})
    posted = (request.POST, request.FILES) if request.method == "POST" else ()
    form = SubmitForm(*posted, only=None if sees_all_tenants(request.user) else first)
    if form.is_bound and form.is_valid():
        _check_size(form)
        batch = None if form.errors else _submit(request, form)
        if batch is not None:
            return redirect("job-upload", batch_uuid=batch.uuid)
    context = {
        "form": form,
        "size_most": min(PAGE_FILE_BYTES_MOST, settings.JOB_FILE_LIMIT_BYTES),
        "nav_section": "jobs",
        "address": request.build_absolute_uri("/v1"),
    }
    return render(request, "jobs/new.html", context, status=422 if form.is_bound else 200)


def _check_size(form: SubmitForm) -> None:
    most = min(PAGE_FILE_BYTES_MOST, settings.JOB_FILE_LIMIT_BYTES)
    size = form.cleaned_data["file"].size
    if size > most:
        form.add_error("file", f"The file has {size:,} bytes; this form takes {most:,}. Send it with the client.")


def _submit(request: HttpRequest, form: SubmitForm) -> Batch | None:
    """Stores and submits; what is wrong goes onto the form, and a file that no batch reads is taken away again."""
    now, actor = timezone.now(), actor_of(request)
    sent = form.cleaned_data["file"]
    try:
        file = store(tenant=form.owner, filename=sent.name, pieces=sent.chunks(), actor=actor, now=now)
    except StorageError as error:
        log.error("a file was not stored: %s", error)
        form.add_error("file", "The file store does not answer, so nothing was stored. Try again later.")
        return None
    try:
        order = BatchOrder(
            input_file_id=file_id(file), endpoint=form.cleaned_data["endpoint"], metadata=form.metadata()
        )
        return batch_actions.submit_batch(tenant=form.owner, key=None, order=order, actor=actor, now=now)
    except ValidationError as error:
        take_errors(form, error, FIELD_OF)
        batch_actions.delete_file(tenant=form.owner, file_id=file_id(file), actor=actor, now=now)
        return None


@requires("job.read")
@never_cache
def job_upload(request: HttpRequest, batch_uuid: uuid.UUID) -> HttpResponseBase:
    """What becomes of a file; once its job runs, this leads there."""
    batch = listing.visible_batches(request.user).filter(uuid=batch_uuid).first()
    if batch is None:
        raise Http404("There is no such upload.")
    checking = batch.state == Batch.State.VALIDATING
    renewing = bool(request.headers.get("HX-Request"))
    if batch.job is not None and not checking and batch.state != Batch.State.FAILED:
        address = reverse("job", args=[batch.job.uuid])
        return HttpResponse(headers={"HX-Redirect": address}) if renewing else redirect(address)
    context = {
        "batch": batch,
        "checking": checking,
        "errors": batch.errors,
        "errors_cut": len(batch.errors) >= ERRORS_MOST,
        "share": min(1.0, batch.imported_bytes / batch.input_file.size_bytes) if batch.input_file.size_bytes else None,
        "may_submit": may(request.user, "job.submit"),
        "now": timezone.now(),
        "nav_section": "jobs",
    }
    return render(request, "jobs/_upload.html" if renewing else "jobs/upload.html", context)
