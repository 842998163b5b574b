"""REST of classes and contracts."""

from typing import Any

import django_filters
from django.db.models import QuerySet
from django.utils import timezone
from drf_spectacular.utils import extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.audit.actors import actor_of
from controlplane.contracts import actions, queries
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.contracts.wording import alert_lines, sentence
from controlplane.tenants.access import may
from controlplane.tenants.rest import ReasonField, ReasonSerializer, VersionedViewSet, edits, writes

SLUGS = "[a-z0-9-]+"


# ---- classes ----


class ClassSerializer(serializers.ModelSerializer):
    """A workload class. Shares are in millionths, durations in the unit of their name."""

    downgrade_to = serializers.SlugRelatedField("slug", read_only=True, allow_null=True)

    class Meta:
        model = WorkloadClass
        fields = ("slug", "kind", "state", *actions.CLASS_FIELDS, "created_at", "updated_at", "version")


class ClassWriteSerializer(serializers.ModelSerializer):
    """What can be written of a class."""

    downgrade_to = serializers.SlugRelatedField(
        "slug", queryset=WorkloadClass.objects.exclude(state="archived"), allow_null=True, required=False
    )
    reason = ReasonField()

    class Meta:
        model = WorkloadClass
        fields = (*actions.CLASS_FIELDS, "reason")
        extra_kwargs = {name: {"required": False} for name in actions.CLASS_FIELDS if name != "downgrade_to"}
        validators: list[Any] = []


class ClassCreateSerializer(ClassWriteSerializer):
    slug = serializers.CharField(max_length=63)
    kind = serializers.ChoiceField(WorkloadClass.Kind.choices)
    reason = ReasonField(required=False)

    class Meta(ClassWriteSerializer.Meta):
        fields = (*ClassWriteSerializer.Meta.fields, "slug", "kind")


class ClassFilter(django_filters.FilterSet):
    q = django_filters.CharFilter("slug", "icontains", label="Part of the slug")

    class Meta:
        model = WorkloadClass
        fields = ("kind", "state", "overload")


class ClassViewSet(ListModelMixin, VersionedViewSet):
    """Workload classes."""

    read_permission = "class.read"
    write_permission = "class.write"
    action_permissions = {"suspend": "class.suspend", "resume": "class.suspend"}
    serializer_class = ClassSerializer
    filterset_class = ClassFilter
    ordering_fields = ("slug", "priority", "created_at")
    ordering = ("slug",)
    lookup_field = "slug"
    lookup_value_regex = SLUGS

    def get_queryset(self) -> QuerySet[WorkloadClass]:
        return WorkloadClass.objects.select_related("downgrade_to")

    @extend_schema(request=ClassCreateSerializer, responses={201: ClassSerializer})
    @writes
    def create(self, request: Request) -> Response:
        values = self.body(ClassCreateSerializer)
        row = actions.create_class(
            slug=values.pop("slug"),
            kind=values.pop("kind"),
            reason=values.pop("reason", ""),
            values=values,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row, status.HTTP_201_CREATED)

    @extend_schema(request=ClassWriteSerializer)
    @edits
    def partial_update(self, request: Request, slug: str) -> Response:
        version = self.wanted_version(self.get_object())
        values = self.body(ClassWriteSerializer, partial=True)
        row = actions.edit_class(
            slug=slug,
            reason=values.pop("reason", ""),
            values=values,
            version=version,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def suspend(self, request: Request, slug: str) -> Response:
        """Refuses the class's new requests within seconds."""
        return self._move(request, slug, actions.suspend_class)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def resume(self, request: Request, slug: str) -> Response:
        """Takes the class's requests again; an archived one comes back to use, which needs `class.write`."""
        if self.get_object().state == WorkloadClass.State.ARCHIVED and not may(request.user, "class.write"):
            raise PermissionDenied("Your role does not include class.write.")
        return self._move(request, slug, actions.resume_class)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def archive(self, request: Request, slug: str) -> Response:
        """Takes a class that nothing uses out of use."""
        return self._move(request, slug, actions.archive_class)

    def _move(self, request: Request, slug: str, act: Any) -> Response:
        self.get_object()
        reason = self.body(ReasonSerializer)["reason"]
        return self.answer(act(slug=slug, reason=reason, actor=actor_of(request), now=timezone.now()))


# ---- contracts ----


class PromisedAlertSerializer(serializers.Serializer):
    """A burn alert of a contract: whether its target lets it fire, and the arithmetic."""

    severity = serializers.CharField()
    factor = serializers.CharField()
    reachable = serializers.BooleanField()
    arithmetic = serializers.CharField()


class VersionSerializer(serializers.ModelSerializer):
    """One promise of a contract, `reads` aloud; `alerts` says which burn alerts its target allows."""

    reads = serializers.SerializerMethodField()
    alerts = serializers.SerializerMethodField()

    class Meta:
        model = ContractVersion
        fields = (
            "number", "effective_from", *actions.VERSION_FIELDS, "created_by", "created_at", "reason", "reads",
            "alerts",
        )  # fmt: skip

    def get_reads(self, version: ContractVersion) -> str:
        return sentence(version)

    @extend_schema_field(PromisedAlertSerializer(many=True))
    def get_alerts(self, version: ContractVersion) -> list[dict[str, Any]]:
        return [
            {
                "severity": line.severity, "factor": line.factor, "reachable": line.reachable,
                "arithmetic": line.arithmetic,
            }
            for line in alert_lines(version.target_ppm)
        ]  # fmt: skip


class ContractSerializer(serializers.ModelSerializer):
    """A contract; `in_force` is the version that judges now, `next` the one to come."""

    workload_class = serializers.SlugRelatedField("slug", read_only=True)
    tenant = serializers.SlugRelatedField("slug", read_only=True)
    in_force = serializers.SerializerMethodField()
    next = serializers.SerializerMethodField()

    class Meta:
        model = Contract
        fields = (
            "slug", "name", "workload_class", "tenant", "archived_at", "created_at", "version", "in_force", "next",
        )  # fmt: skip

    @extend_schema_field(VersionSerializer(allow_null=True))
    def get_in_force(self, contract: Contract) -> dict[str, Any] | None:
        return self._version(contract).get("in_force")

    @extend_schema_field(VersionSerializer(allow_null=True))
    def get_next(self, contract: Contract) -> dict[str, Any] | None:
        return self._version(contract).get("next")

    def _version(self, contract: Contract) -> dict[str, Any]:
        """Versions are read once for the whole answer, not once a contract."""
        known: dict[str, Any] = self.context  # type: ignore[assignment]
        if "versions" not in known:
            listed: Any = self.parent.instance if self.parent is not None else [contract]
            found = queries.standings(list(listed), timezone.now())
            known["versions"] = {
                row.contract.pk: {
                    "in_force": VersionSerializer(row.in_force).data if row.in_force else None,
                    "next": VersionSerializer(row.next).data if row.next else None,
                }
                for row in found
            }
        return known["versions"].get(contract.pk, {})


class VersionWriteSerializer(serializers.ModelSerializer):
    """The next version: what is left out stays as in the newest; without `effective_from` it begins at once."""

    effective_from = serializers.DateTimeField(required=False)
    reason = ReasonField()

    class Meta:
        model = ContractVersion
        fields = (*actions.VERSION_FIELDS, "effective_from", "reason")
        extra_kwargs = {name: {"required": False} for name in actions.VERSION_FIELDS}
        validators: list[Any] = []


class ContractCreateSerializer(VersionWriteSerializer):
    slug = serializers.CharField(max_length=63)
    name = serializers.CharField(max_length=120, required=False)
    workload_class = serializers.CharField(max_length=63)
    tenant = serializers.CharField(max_length=63, required=False, allow_null=True)
    reason = ReasonField(required=False)

    class Meta(VersionWriteSerializer.Meta):
        fields = (*VersionWriteSerializer.Meta.fields, "slug", "name", "workload_class", "tenant")


class ContractFilter(django_filters.FilterSet):
    workload_class = django_filters.CharFilter("workload_class__slug")
    tenant = django_filters.CharFilter("tenant__slug")
    ended = django_filters.BooleanFilter("archived_at", "isnull", exclude=True)

    class Meta:
        model = Contract
        fields: tuple[str, ...] = ()


class ContractViewSet(ListModelMixin, VersionedViewSet):
    """Contracts. A change is a new version; what is in force is never edited."""

    read_permission = "contract.read"
    write_permission = "contract.write"
    serializer_class = ContractSerializer
    filterset_class = ContractFilter
    ordering_fields = ("slug", "created_at")
    ordering = ("slug",)
    lookup_field = "slug"
    lookup_value_regex = SLUGS

    def get_queryset(self) -> QuerySet[Contract]:
        return queries.visible_contracts(self.request.user)

    @extend_schema(request=ContractCreateSerializer, responses={201: ContractSerializer})
    @writes
    def create(self, request: Request) -> Response:
        values = self.body(ContractCreateSerializer)
        row = actions.create_contract(
            slug=values.pop("slug"),
            name=values.pop("name", ""),
            class_slug=values.pop("workload_class"),
            tenant_slug=values.pop("tenant", None) or "",
            effective_from=values.pop("effective_from", None),
            reason=values.pop("reason", ""),
            values=values,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row, status.HTTP_201_CREATED)

    @extend_schema(methods=["get"], responses=VersionSerializer(many=True))
    @extend_schema(methods=["post"], request=VersionWriteSerializer, responses={201: VersionSerializer})
    @action(detail=True, methods=["get", "post"], pagination_class=None, filterset_class=None)
    @edits
    def versions(self, request: Request, slug: str) -> Response:
        """All versions, newest first; POST (with If-Match of the contract) adds the next."""
        contract = self.get_object()
        if request.method == "GET":
            return Response(VersionSerializer(contract.versions.order_by("-number"), many=True).data)
        version = self.wanted_version(contract)
        values = self.body(VersionWriteSerializer, partial=True)
        row = actions.add_version(
            slug=slug,
            effective_from=values.pop("effective_from", None),
            reason=values.pop("reason", ""),
            values=values,
            version=version,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return Response(VersionSerializer(row).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @edits
    def archive(self, request: Request, slug: str) -> Response:
        """Ends the contract."""
        version = self.wanted_version(self.get_object())
        reason = self.body(ReasonSerializer)["reason"]
        row = actions.archive_contract(
            slug=slug, reason=reason, version=version, actor=actor_of(request), now=timezone.now()
        )
        return self.answer(row)
