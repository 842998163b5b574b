"""REST of tenants, API keys and members."""

from datetime import timedelta
from typing import Any

import django_filters
from django.db.models import QuerySet
from django.shortcuts import get_object_or_404
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.mixins import ListModelMixin
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.audit.actors import actor_of
from controlplane.tenants import actions, key_actions, member_actions
from controlplane.tenants.models import ApiKey, Member, Tenant
from controlplane.tenants.queries import members, search_keys, slug_or_name_holds, visible_keys, visible_tenants
from controlplane.tenants.rest import ReasonField, ReasonSerializer, SlugField, VersionedViewSet, edits, writes
from controlplane.web.openapi import problem


class TenantSerializer(serializers.ModelSerializer):
    """A tenant. Parents are named by slug."""

    parent = serializers.SlugRelatedField("slug", read_only=True, allow_null=True)

    class Meta:
        model = Tenant
        fields = (
            "slug", "name", "parent", "state", "weight", "max_concurrency", "classes", "model_names", "outage_posture",
            "cost_centre", "suspend_reason", "created_at", "updated_at", "version",
        )  # fmt: skip


class TenantWriteSerializer(serializers.Serializer):
    """What can be written of a tenant."""

    name = serializers.CharField(max_length=120)
    parent = SlugField(Tenant.objects.all(), allow_null=True, required=False)
    weight = serializers.IntegerField(min_value=1, max_value=10_000, required=False)
    max_concurrency = serializers.IntegerField(min_value=1, max_value=2**31 - 1, required=False)
    classes = serializers.ListField(child=serializers.CharField(max_length=63), required=False)
    model_names = serializers.ListField(child=serializers.CharField(max_length=120), required=False)
    outage_posture = serializers.ChoiceField(Tenant.Posture.choices, required=False)
    cost_centre = serializers.CharField(max_length=60, allow_blank=True, required=False)
    reason = ReasonField(required=False)


class TenantCreateSerializer(TenantWriteSerializer):
    slug = serializers.SlugField(max_length=63)


class TenantFilter(django_filters.FilterSet):
    q = django_filters.CharFilter(method="search", label="Part of the slug or name")
    parent = django_filters.CharFilter("parent__slug")
    workload_class = django_filters.CharFilter(method="of_class", label="Tenants that have this class")

    class Meta:
        model = Tenant
        fields = ("state",)

    def search(self, rows: QuerySet[Tenant], name: str, value: str) -> QuerySet[Tenant]:
        return rows.filter(slug_or_name_holds(value))

    def of_class(self, rows: QuerySet[Tenant], name: str, value: str) -> QuerySet[Tenant]:
        return rows.filter(classes__contains=[value])


class TenantViewSet(ListModelMixin, VersionedViewSet):
    """Tenants."""

    read_permission = "tenant.read"
    write_permission = "tenant.write"
    action_permissions = {"suspend": "tenant.suspend", "resume": "tenant.suspend"}
    serializer_class = TenantSerializer
    filterset_class = TenantFilter
    ordering_fields = ("slug", "created_at", "weight")
    ordering = ("slug",)
    lookup_field = "slug"
    lookup_value_regex = "[a-z0-9-]+"

    def get_queryset(self) -> QuerySet[Tenant]:
        return visible_tenants(self.request.user).select_related("parent")

    @extend_schema(request=TenantCreateSerializer)
    @writes
    def create(self, request: Request) -> Response:
        values = _with_parent(self.body(TenantCreateSerializer))
        row = actions.create_tenant(**values, actor=actor_of(request), now=timezone.now())
        return self.answer(row, status.HTTP_201_CREATED)

    @extend_schema(request=TenantWriteSerializer)
    @edits
    def partial_update(self, request: Request, slug: str) -> Response:
        row = self.get_object()
        version = self.wanted_version(row)
        values = _with_parent(self.body(TenantWriteSerializer, partial=True))
        reason = values.pop("reason", "")
        row = actions.edit_tenant(
            tenant_id=row.pk,
            version=version,
            changes=values,
            reason=reason,
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def suspend(self, request: Request, slug: str) -> Response:
        """Refuses the tenant's new requests at once."""
        row, reason = self.get_object(), self.body(ReasonSerializer)["reason"]
        return self.answer(
            actions.suspend_tenant(tenant_id=row.pk, reason=reason, actor=actor_of(request), now=timezone.now())
        )

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def resume(self, request: Request, slug: str) -> Response:
        """Takes the tenant's requests again."""
        row, reason = self.get_object(), self.body(ReasonSerializer)["reason"]
        return self.answer(
            actions.resume_tenant(tenant_id=row.pk, reason=reason, actor=actor_of(request), now=timezone.now())
        )

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @edits
    def archive(self, request: Request, slug: str) -> Response:
        """Ends the tenant and revokes its keys."""
        row, reason = self.get_object(), self.body(ReasonSerializer)["reason"]
        version = self.wanted_version(row)
        return self.answer(
            actions.archive_tenant(
                tenant_id=row.pk, version=version, reason=reason, actor=actor_of(request), now=timezone.now()
            )
        )


class KeySerializer(serializers.ModelSerializer):
    """A key without its secret."""

    id = serializers.CharField(source="public_id", read_only=True)
    tenant = serializers.SlugRelatedField("slug", read_only=True)

    class Meta:
        model = ApiKey
        fields = (
            "id", "tenant", "name", "prefix", "state", "classes", "default_class", "expires_at", "max_concurrency",
            "requests_per_s", "tokens_per_minute", "previous_valid_until", "rotated_at", "created_at", "revoked_at",
            "last_used_at", "version",
        )  # fmt: skip


class IssuedKeySerializer(KeySerializer):
    """A key with the secret that is shown this once; null where it cannot be shown again."""

    secret = serializers.CharField(allow_null=True, read_only=True)

    class Meta(KeySerializer.Meta):
        fields = (*KeySerializer.Meta.fields, "secret")


class KeyWriteSerializer(serializers.Serializer):
    """What can be written of a key."""

    name = serializers.CharField(max_length=120)
    classes = serializers.ListField(child=serializers.CharField(max_length=63), allow_empty=False)
    default_class = serializers.CharField(max_length=63)
    expires_at = serializers.DateTimeField(allow_null=True, required=False)
    max_concurrency = serializers.IntegerField(min_value=1, max_value=2**31 - 1, allow_null=True, required=False)
    requests_per_s = serializers.FloatField(min_value=0.001, max_value=1e6, allow_null=True, required=False)
    tokens_per_minute = serializers.IntegerField(min_value=1, max_value=2**31 - 1, allow_null=True, required=False)
    reason = ReasonField(required=False)


class KeyCreateSerializer(KeyWriteSerializer):
    tenant = serializers.SlugField(max_length=63)


class RotateSerializer(serializers.Serializer):
    """A rotation under the caller's name for it: repeating the name rotates nothing."""

    rotation_id = serializers.CharField(min_length=8, max_length=64)
    overlap_hours = serializers.IntegerField(min_value=0, max_value=720, default=48)
    end_overlap = serializers.BooleanField(default=False)
    reason = ReasonField()


class KeyFilter(django_filters.FilterSet):
    q = django_filters.CharFilter(method="search", label="Part of name, id, prefix or tenant")
    tenant = django_filters.CharFilter("tenant__slug")

    class Meta:
        model = ApiKey
        fields = ("state",)

    def search(self, rows: QuerySet[ApiKey], name: str, value: str) -> QuerySet[ApiKey]:
        return search_keys(rows, value)


class KeyViewSet(ListModelMixin, VersionedViewSet):
    """API keys."""

    read_permission = "key.read"
    write_permission = "key.write"
    serializer_class = KeySerializer
    filterset_class = KeyFilter
    ordering_fields = ("created_at", "name", "last_used_at")
    ordering = ("-id",)
    lookup_field = "public_id"
    lookup_url_kwarg = "public_id"
    lookup_value_regex = "[a-z0-9_]+"

    def get_queryset(self) -> QuerySet[ApiKey]:
        return visible_keys(self.request.user)

    @extend_schema(request=KeyCreateSerializer, responses={201: IssuedKeySerializer, **problem(404)})
    @writes
    def create(self, request: Request) -> Response:
        values = self.body(KeyCreateSerializer)
        tenant = get_object_or_404(visible_tenants(request.user), slug=values.pop("tenant"))
        issued = key_actions.create_key(tenant_id=tenant.pk, **values, actor=actor_of(request), now=timezone.now())
        return self.answer(issued.key, status.HTTP_201_CREATED, secret=issued.secret)

    @extend_schema(request=KeyWriteSerializer)
    @edits
    def partial_update(self, request: Request, public_id: str) -> Response:
        row = self.get_object()
        version = self.wanted_version(row)
        values = self.body(KeyWriteSerializer, partial=True)
        reason = values.pop("reason", "")
        row = key_actions.edit_key(
            key_id=row.pk, version=version, changes=values, reason=reason, actor=actor_of(request), now=timezone.now()
        )
        return self.answer(row)

    @extend_schema(request=RotateSerializer, responses=IssuedKeySerializer)
    @action(detail=True, methods=["post"])
    @writes
    def rotate(self, request: Request, public_id: str) -> Response:
        """Gives the key a new secret; the present one works for the overlap."""
        row, values = self.get_object(), self.body(RotateSerializer)
        issued = key_actions.rotate_key(
            key_id=row.pk,
            rotation_id=values["rotation_id"],
            overlap=timedelta(hours=values["overlap_hours"]),
            end_overlap=values["end_overlap"],
            reason=values["reason"],
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(issued.key, secret=issued.secret)

    @extend_schema(request=ReasonSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def revoke(self, request: Request, public_id: str) -> Response:
        """Ends the key for ever."""
        row, reason = self.get_object(), self.body(ReasonSerializer)["reason"]
        return self.answer(
            key_actions.revoke_key(key_id=row.pk, reason=reason, actor=actor_of(request), now=timezone.now())
        )


class MemberSerializer(serializers.ModelSerializer):
    """A person who can sign in."""

    username = serializers.CharField(source="user.username", read_only=True)
    full_name = serializers.CharField(source="user.first_name", read_only=True)
    email = serializers.CharField(source="user.email", read_only=True)
    last_sign_in_at = serializers.DateTimeField(source="user.last_login", read_only=True, allow_null=True)
    tenant = serializers.SlugRelatedField("slug", read_only=True, allow_null=True)

    class Meta:
        model = Member
        fields = ("id", "username", "full_name", "email", "role", "tenant", "last_sign_in_at", "version")


class MemberWriteSerializer(serializers.Serializer):
    """Role and tenant of a person."""

    role = serializers.ChoiceField(Member.Role.choices)
    tenant = SlugField(Tenant.objects.all(), allow_null=True, required=False)
    reason = ReasonField(required=False)


class MemberCreateSerializer(serializers.Serializer):
    """A new person."""

    username = serializers.CharField(max_length=150)
    password = serializers.CharField(write_only=True, max_length=256)
    role = serializers.ChoiceField(Member.Role.choices)
    tenant = SlugField(Tenant.objects.all(), allow_null=True, required=False)
    full_name = serializers.CharField(max_length=150, allow_blank=True, required=False)
    email = serializers.EmailField(allow_blank=True, required=False)


class MemberFilter(django_filters.FilterSet):
    tenant = django_filters.CharFilter("tenant__slug")
    username = django_filters.CharFilter("user__username", "icontains")

    class Meta:
        model = Member
        fields = ("role",)


class MemberViewSet(ListModelMixin, VersionedViewSet):
    """Members."""

    read_permission = "member.read"
    write_permission = "member.write"
    serializer_class = MemberSerializer
    filterset_class = MemberFilter
    ordering_fields = ("id", "role")
    ordering = ("id",)
    lookup_value_regex = "[0-9]+"

    def get_queryset(self) -> QuerySet[Member]:
        return members()

    @extend_schema(request=MemberCreateSerializer)
    @writes
    def create(self, request: Request) -> Response:
        values = self.body(MemberCreateSerializer)
        tenant = values.pop("tenant", None)
        row = member_actions.create_member(
            **values, tenant_id=tenant.pk if tenant else None, actor=actor_of(request), now=timezone.now()
        )
        return self.answer(row, status.HTTP_201_CREATED)

    @extend_schema(request=MemberWriteSerializer)
    @edits
    def partial_update(self, request: Request, pk: str) -> Response:
        row = self.get_object()
        version = self.wanted_version(row)
        values = self.body(MemberWriteSerializer, partial=True)
        tenant = values.get("tenant", row.tenant)
        row = member_actions.edit_member(
            member_id=row.pk,
            version=version,
            role=values.get("role", row.role),
            tenant_id=tenant.pk if tenant else None,
            reason=values.get("reason", ""),
            actor=actor_of(request),
            now=timezone.now(),
        )
        return self.answer(row)

    @edits
    def destroy(self, request: Request, pk: str) -> Response:
        row = self.get_object()
        self.wanted_version(row)
        member_actions.remove_member(member_id=row.pk, actor=actor_of(request), now=timezone.now())
        return Response(status=status.HTTP_204_NO_CONTENT)


def _with_parent(values: dict[str, Any]) -> dict[str, Any]:
    """The action takes the parent's id."""
    if "parent" in values:
        parent = values.pop("parent")
        values["parent_id"] = parent.pk if parent else None
    return values
