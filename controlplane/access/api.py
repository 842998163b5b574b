"""REST of how people get in: sessions, invitations, personal tokens, and the second factors of members."""

from typing import Any

import django_filters
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet
from django.http import Http404
from django.utils import timezone
from drf_spectacular.utils import extend_schema
from rest_framework import serializers, status
from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied
from rest_framework.mixins import ListModelMixin, RetrieveModelMixin
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import GenericViewSet

from controlplane.access import invitation_actions, queries, token_actions
from controlplane.access.confirming import is_confirmed
from controlplane.access.invitation_links import link_of, mail
from controlplane.access.models import Invitation, PersonalToken, Session
from controlplane.access.session_actions import end_sessions, remove_factors
from controlplane.audit.actors import actor_of
from controlplane.tenants.access import may
from controlplane.tenants.models import Member, Tenant
from controlplane.tenants.queries import member_for, members
from controlplane.tenants.rest import ReasonSerializer, SlugField, checked, writes
from controlplane.tenants.roles import PERMISSIONS
from controlplane.web.api import Ended
from controlplane.web.openapi import problem

UUIDS = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
ID_MAX = 2**31 - 1


class ConfirmationRequired(PermissionDenied):
    default_code = "confirmation_required"
    default_detail = (
        "A new token is a new way in: make it in a signed-in browser that confirmed within five minutes who you are, on"
        " your account page or from there. A token makes no token."
    )


class OfPerson(django_filters.FilterSet):
    """What belongs to one person."""

    member = django_filters.NumberFilter("user__member__id", min_value=1, max_value=ID_MAX)
    username = django_filters.CharFilter("user__username")


class OwnedSerializer(serializers.ModelSerializer):
    """Whose it is."""

    username = serializers.CharField(source="user.username", read_only=True)
    member = serializers.IntegerField(source="user.member.pk", read_only=True)


def _check_owner(request: Request, owner: User) -> None:
    """`own.write`, which the view asks for, is for one's own; for another's it takes `member.write` too."""
    if owner.pk != request.user.pk and not may(request.user, "member.write"):
        raise PermissionDenied("It is another person's, and your role, or your token, does not include member.write.")


# ---- sessions ----


class SessionSerializer(OwnedSerializer):
    """A browser that is signed in. `method` is what with; `current` is the session that asks."""

    id = serializers.UUIDField(source="public_id", read_only=True)
    expires_at = serializers.DateTimeField(source="expire_date", read_only=True)
    current = serializers.SerializerMethodField()

    class Meta:
        model = Session
        fields = (
            "id", "username", "member", "agent", "address", "method", "began_at", "last_used_at", "expires_at",
            "current",
        )  # fmt: skip

    def get_current(self, row: Session) -> bool:
        return row.session_key == self.context["request"].session.session_key


class SessionsEndSerializer(serializers.Serializer):
    """Whose: without `member` your own, but the one that asks."""

    member = serializers.IntegerField(min_value=1, max_value=ID_MAX, required=False)


class SessionsEndedSerializer(serializers.Serializer):
    ended = serializers.IntegerField()


class SessionViewSet(ListModelMixin, GenericViewSet):
    """Sessions: your own, and everybody's for who may see members."""

    read_permission = "own.read"
    write_permission = "own.write"
    serializer_class = SessionSerializer
    filterset_class = OfPerson
    ordering_fields = ("last_used_at", "began_at")
    ordering = ("-last_used_at",)
    lookup_field = "public_id"
    lookup_value_regex = UUIDS

    def get_queryset(self) -> QuerySet[Session]:
        return queries.visible_sessions(self.request.user, timezone.now())  # type: ignore[arg-type]

    @writes
    def destroy(self, request: Request, public_id: str) -> Response:
        """Ends a session: pages refuse it at once, live pages that are open close within 5 seconds."""
        row = self.get_queryset().filter(public_id=public_id).first()  # two, for a moment, while its key changes
        if row is None or row.user is None:
            raise Http404
        _check_owner(request, row.user)
        end_sessions(user=row.user, public_id=public_id, actor=actor_of(request), now=timezone.now())
        return Response(status=status.HTTP_204_NO_CONTENT)

    @extend_schema(request=SessionsEndSerializer, responses={200: SessionsEndedSerializer, **problem(404)})
    @action(detail=False, methods=["post"])
    @writes
    def end(self, request: Request) -> Response:
        """Ends all sessions of a member, or all of your own but the one that asks."""
        member_id = checked(SessionsEndSerializer, request).get("member")
        user: Any = request.user
        if member_id is not None:
            rows = members() if may(request.user, "member.read") else members().filter(user_id=user.pk)
            found = rows.filter(pk=member_id).first()
            if found is None:
                raise Http404
            user = found.user
            _check_owner(request, user)
        own_key = request.session.session_key if member_id is None else None
        ended = end_sessions(user=user, but_key=own_key, actor=actor_of(request), now=timezone.now())
        return Response({"ended": ended})


# ---- invitations ----


class InvitationSerializer(serializers.ModelSerializer):
    """An invitation that nobody has taken yet."""

    tenant = serializers.SlugRelatedField("slug", read_only=True, allow_null=True)

    class Meta:
        model = Invitation
        fields = ("id", "email", "full_name", "role", "tenant", "created_at", "created_by", "expires_at")


class IssuedInvitationSerializer(InvitationSerializer):
    """An invitation with the link that is told this once; null where it cannot be told again."""

    link = serializers.CharField(allow_null=True, read_only=True)

    class Meta(InvitationSerializer.Meta):
        fields = (*InvitationSerializer.Meta.fields, "link")


class InvitationCreateSerializer(serializers.Serializer):
    """Whom to invite, as what, and for how many days the link works."""

    email = serializers.EmailField(max_length=254)
    full_name = serializers.CharField(max_length=150, allow_blank=True, required=False)
    role = serializers.ChoiceField(Member.Role.choices)
    tenant = SlugField(Tenant.objects.all(), allow_null=True, required=False)
    days = serializers.IntegerField(min_value=1, max_value=invitation_actions.DAYS_MAX, default=7)


class InvitationFilter(django_filters.FilterSet):
    tenant = django_filters.CharFilter("tenant__slug")
    email = django_filters.CharFilter("email", "icontains")

    class Meta:
        model = Invitation
        fields = ("role",)


class InvitationViewSet(ListModelMixin, RetrieveModelMixin, GenericViewSet):
    """Invitations that are open."""

    read_permission = "member.read"
    write_permission = "member.write"
    serializer_class = InvitationSerializer
    filterset_class = InvitationFilter
    ordering_fields = ("id", "expires_at")
    ordering = ("-id",)
    lookup_value_regex = r"\d{1,18}"

    def get_queryset(self) -> QuerySet[Invitation]:
        return queries.open_invitations(timezone.now()).select_related("tenant")

    @extend_schema(request=InvitationCreateSerializer, responses={201: IssuedInvitationSerializer})
    @writes
    def create(self, request: Request) -> Response:
        """Invites somebody. With a mail server the person gets the link by e-mail too."""
        values = checked(InvitationCreateSerializer, request)
        tenant = values.pop("tenant", None)
        issued = invitation_actions.invite(
            **values, tenant_id=tenant.pk if tenant else None, actor=actor_of(request), now=timezone.now()
        )
        link = link_of(issued, request._request)
        transaction.on_commit(lambda: mail(issued.invitation, link))
        body = {**self.get_serializer(issued.invitation).data, "link": link}
        return Response(body, status=status.HTTP_201_CREATED)

    @extend_schema(request=None, responses={204: None, **problem(409, "It was used or ended meanwhile.")})
    @action(detail=True, methods=["post"])
    @writes
    def withdraw(self, request: Request, pk: str) -> Response:
        """The link no longer works."""
        if not invitation_actions.withdraw(
            invitation_id=self.get_object().pk, actor=actor_of(request), now=timezone.now()
        ):
            raise Ended("The invitation was used or ended already.")
        return Response(status=status.HTTP_204_NO_CONTENT)


# ---- personal tokens ----


class PersonalTokenSerializer(OwnedSerializer):
    """A token without its secret."""

    in_force = serializers.SerializerMethodField()

    class Meta:
        model = PersonalToken
        fields = (
            "id", "username", "member", "name", "prefix", "permissions", "in_force", "created_at", "expires_at",
            "revoked_at", "last_used_at",
        )  # fmt: skip

    def get_in_force(self, row: PersonalToken) -> bool:
        return queries.is_live(row)


class IssuedPersonalTokenSerializer(PersonalTokenSerializer):
    """A token with the secret that is shown this once; null where it cannot be shown again."""

    secret = serializers.CharField(allow_null=True, read_only=True)

    class Meta(PersonalTokenSerializer.Meta):
        fields = (*PersonalTokenSerializer.Meta.fields, "secret")


class PersonalTokenCreateSerializer(serializers.Serializer):
    """A token of your own: what it may, within what your role allows, and for how many days."""

    name = serializers.CharField(max_length=120)
    permissions = serializers.ListField(
        child=serializers.ChoiceField(list(PERMISSIONS)), allow_empty=False, max_length=len(PERMISSIONS)
    )
    days = serializers.IntegerField(min_value=1, max_value=token_actions.DAYS_MAX, default=90)


class TokenViewSet(ListModelMixin, GenericViewSet):
    """Personal tokens: your own, and everybody's for who may see members."""

    read_permission = "own.read"
    write_permission = "own.write"
    serializer_class = PersonalTokenSerializer
    filterset_class = OfPerson
    ordering_fields = ("id", "created_at", "expires_at", "last_used_at")
    ordering = ("-id",)
    lookup_value_regex = r"\d{1,18}"

    def get_queryset(self) -> QuerySet[PersonalToken]:
        return queries.visible_tokens(self.request.user)  # type: ignore[arg-type]

    @extend_schema(request=PersonalTokenCreateSerializer, responses={201: IssuedPersonalTokenSerializer})
    @writes
    def create(self, request: Request) -> Response:
        """Makes a token of your own. It asks for a session that confirmed within five minutes who you are."""
        if request.auth is not None or not is_confirmed(request._request):
            raise ConfirmationRequired
        issued = token_actions.create_token(
            user_id=request.user.pk or 0,
            **checked(PersonalTokenCreateSerializer, request),
            actor=actor_of(request),
            now=timezone.now(),
        )
        body = {**self.get_serializer(issued.token).data, "secret": issued.secret}
        return Response(body, status=status.HTTP_201_CREATED)

    @extend_schema(request=None)
    @action(detail=True, methods=["post"])
    @writes
    def revoke(self, request: Request, pk: str) -> Response:
        """Ends a token: its next call is refused. Again changes nothing."""
        row = self.get_object()
        _check_owner(request, row.user)
        token_actions.revoke_token(token=row, actor=actor_of(request), now=timezone.now())
        return Response(self.get_serializer(self.get_object()).data)


# ---- second factors of members ----


class PasskeySerializer(serializers.Serializer):
    name = serializers.CharField(source="wrap.name")
    created_at = serializers.DateTimeField()
    last_used_at = serializers.DateTimeField(allow_null=True)


class FactorsSerializer(serializers.Serializer):
    """How a member proves more than the password; `recovery_codes` are those left, null without any."""

    member = serializers.IntegerField()
    username = serializers.CharField()
    app = serializers.BooleanField()
    passkeys = PasskeySerializer(many=True)
    recovery_codes = serializers.IntegerField(allow_null=True)


class FactorsRemovedSerializer(serializers.Serializer):
    removed = serializers.IntegerField()


class FactorsViewSet(GenericViewSet):
    """Second factors, by the id of the member."""

    read_permission = "member.read"
    write_permission = "member.write"
    serializer_class = FactorsSerializer
    queryset = Member.objects.none()
    lookup_value_regex = r"\d{1,9}"

    @extend_schema(responses=FactorsSerializer)
    def retrieve(self, request: Request, pk: str) -> Response:
        member = member_for(int(pk))
        found = queries.factors_of(member.user)
        body = {
            "member": member.pk,
            "username": member.user.username,
            "app": found.totp is not None,
            "passkeys": found.passkeys,
            "recovery_codes": found.codes,
        }
        return Response(FactorsSerializer(body).data)

    @extend_schema(request=ReasonSerializer, responses=FactorsRemovedSerializer)
    @action(detail=True, methods=["post"])
    @writes
    def remove(self, request: Request, pk: str) -> Response:
        """For a lost phone: all factors and all sessions of the member end, and the next sign-in is by password."""
        member, reason = member_for(int(pk)), checked(ReasonSerializer, request)["reason"]
        removed = remove_factors(user=member.user, actor=actor_of(request), now=timezone.now(), reason=reason)
        return Response({"removed": removed})
