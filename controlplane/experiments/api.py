"""REST of experiments: ask, look, cancel, ask again. The answer is the one that is stored.

A question with a file is a form (multipart/form-data) whose `parameters` are one JSON object.
"""

from __future__ import annotations

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db.models import QuerySet
from django.utils import timezone
from django.utils.datastructures import MultiValueDict
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.audit.actors import actor_of
from controlplane.experiments import actions, queries
from controlplane.experiments.forms import FORMS
from controlplane.experiments.models import Experiment
from controlplane.tenants.rest import writes
from controlplane.wakeups.bells import ring
from controlplane.web.api import Ended
from controlplane.web.openapi import problem
from controlplane.web.parsers import BoundedJSONParser


class ExperimentSerializer(serializers.ModelSerializer):
    """An experiment without its answer. `inputs` are the sha256 of each file by its name; `progress` is a share.

    Until `prepared` a worker has yet to read its traffic: `arguments` and `inputs` are not whole.
    """

    arguments = serializers.ListField(child=serializers.CharField(), read_only=True)
    inputs = serializers.DictField(child=serializers.CharField(), read_only=True)
    sha256 = serializers.SerializerMethodField()

    class Meta:
        model = Experiment
        fields = (
            "id", "kind", "title", "parameters", "arguments", "inputs", "seed", "source", "pool", "prepared", "state",
            "progress", "problem", "rerun_of", "created_at", "created_by", "started_at", "ended_at", "sha256",
        )  # fmt: skip
        read_only_fields = fields

    @extend_schema_field(serializers.CharField(allow_null=True))
    def get_sha256(self, row: Experiment) -> str | None:
        """Of the answer; null until there is one."""
        result = getattr(row, "result", None)
        return None if result is None else result.sha256


class AnsweredSerializer(ExperimentSerializer):
    """An experiment with its answer, null until it is done."""

    answer = serializers.SerializerMethodField()

    class Meta(ExperimentSerializer.Meta):
        fields = (*ExperimentSerializer.Meta.fields, "answer")
        read_only_fields = fields

    @extend_schema_field(serializers.JSONField(allow_null=True))
    def get_answer(self, row: Experiment) -> Any:
        return None if getattr(row, "result", None) is None else queries.answer_of(row)


class AskSerializer(serializers.Serializer):
    """A question. `parameters` are the fields of that kind's form; what is left out has its default."""

    kind = serializers.ChoiceField(Experiment.Kind.choices)
    title = serializers.CharField(max_length=120)
    parameters = serializers.DictField(required=False, default=dict)


class AskWithFileSerializer(serializers.Serializer):
    """The same as a form, with the file that the page takes: a trace with `source` `file`, or a list of offers."""

    kind = serializers.ChoiceField(Experiment.Kind.choices)
    title = serializers.CharField(max_length=120)
    parameters = serializers.CharField(required=False, help_text="a JSON object")
    file = serializers.FileField(required=False)


class ExperimentViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """Experiments of the lab, newest first."""

    read_permission = "lab.read"
    write_permission = "lab.run"
    filterset_fields = ("kind", "state", "pool", "created_by")
    ordering_fields = ("id", "created_at")
    ordering = ("-id",)
    lookup_value_regex = r"\d{1,18}"
    parser_classes = (BoundedJSONParser, MultiPartParser)

    def get_queryset(self) -> QuerySet[Experiment]:
        rows = Experiment.objects.select_related("result")
        return rows.defer("result__content") if self.action == "list" else rows

    def get_serializer_class(self) -> type[serializers.BaseSerializer]:
        return AnsweredSerializer if self.action == "retrieve" else ExperimentSerializer

    @extend_schema(
        request={"application/json": AskSerializer, "multipart/form-data": AskWithFileSerializer},
        responses={201: ExperimentSerializer},
    )
    @writes
    def create(self, request: Request) -> Response:
        data, file = _parts(request)
        asked = AskSerializer(data=data)
        asked.is_valid(raise_exception=True)
        given, now = asked.validated_data, timezone.now()
        values = _values(given, file, now)
        row = actions.ask(
            kind=given["kind"], title=given["title"], values=values, actor=actor_of(request), now=now,
            upload=None if file is None else file.read(),
        )  # fmt: skip
        ring("experiments.run", experiment_id=row.pk)
        return Response(ExperimentSerializer(row).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=None, responses={200: ExperimentSerializer, **problem(409, "It has ended.")})
    @action(detail=True, methods=["post"])
    @writes
    def cancel(self, request: Request, pk: str) -> Response:
        row = self.get_object()
        try:
            row = actions.cancel(experiment_id=row.pk, actor=actor_of(request), now=timezone.now())
        except actions.Over as error:
            raise Ended(str(error)) from error
        return Response(ExperimentSerializer(row).data)

    @extend_schema(request=None, responses={201: ExperimentSerializer})
    @action(detail=True, methods=["post"])
    @writes
    def rerun(self, request: Request, pk: str) -> Response:
        row = actions.rerun(experiment_id=self.get_object().pk, actor=actor_of(request), now=timezone.now())
        ring("experiments.run", experiment_id=row.pk)
        return Response(ExperimentSerializer(row).data, status=status.HTTP_201_CREATED)


def _parts(request: Request) -> tuple[Any, UploadedFile | None]:
    """The body as one of JSON would be, and its file. Raises ValidationError for parameters that are no JSON object."""
    if not request.content_type.startswith("multipart/"):
        return request.data, None
    form: Any = request.data
    data = {name: value for name, value in form.items() if name not in ("file", "parameters")}
    try:
        data["parameters"] = json.loads(form.get("parameters") or "{}")
    except (TypeError, ValueError, RecursionError):
        raise ValidationError({"parameters": "Send one JSON object."}) from None
    return data, request.FILES.get("file")


def _values(given: dict[str, Any], file: UploadedFile | None, now: Any) -> dict[str, Any]:
    """The cleaned values of the kind's form. Raises ValidationError by field, for unknown ones too."""
    form_class, parameters = FORMS[given["kind"]], given["parameters"]
    known = {name: field for name, field in form_class.base_fields.items() if name not in ("title", "file")}
    if unknown := sorted(set(map(str, parameters)) - set(known)):
        raise ValidationError({name[:60]: "There is no such parameter of this kind." for name in unknown})
    if file is not None and "file" not in form_class.base_fields:
        raise ValidationError({"file": "This kind takes no file."})
    if wrong := sorted(name for name, value in parameters.items() if isinstance(value, (dict, list))):
        raise ValidationError(dict.fromkeys(wrong, "Give one value."))
    data = {name: field.initial for name, field in known.items() if field.initial is not None}
    data |= {name: value for name, value in parameters.items() if value is not None}
    form = form_class(
        {**{name: _text(value) for name, value in data.items()}, "title": given["title"]},
        None if file is None else MultiValueDict({"file": [file]}),
    )
    if not form.is_valid():
        raise ValidationError({name: [str(text) for text in texts] for name, texts in form.errors.items()})
    return form.values(now)


def _text(value: Any) -> str:
    return value.replace("\0", "") if isinstance(value, str) else str(value)
