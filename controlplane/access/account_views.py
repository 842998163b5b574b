"""One's own account: factors, providers, sessions and tokens; and an administrator's view of somebody's."""

from typing import Any
from uuid import UUID

from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib import messages
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.access.confirming import confirmed, own_account
from controlplane.access.forms import TokenForm
from controlplane.access.models import PersonalToken
from controlplane.access.queries import factors_of, is_live, sessions_of, tokens_of
from controlplane.access.session_actions import end_sessions, remove_factors
from controlplane.access.token_actions import create_token, revoke_token
from controlplane.audit.actors import actor_of
from controlplane.audit.forms import take_errors
from controlplane.tenants.access import lacks_second_factor, requires, role_of
from controlplane.tenants.queries import member_for
from controlplane.tenants.review import reason_of

IN_FORCE = "Pages refuse it at once, live pages that are open close within 5 seconds."


def _access_of(user: User) -> dict[str, Any]:
    now = timezone.now()
    names = {provider.id: provider.name for provider in settings.OPENID_PROVIDERS}
    links = SocialAccount.objects.filter(user=user).order_by("date_joined")
    return {
        "factors": factors_of(user),
        "sessions": list(sessions_of(user.pk, now)),
        "tokens": [(token, is_live(token)) for token in tokens_of(user.pk)],
        "links": [(names.get(link.provider, link.provider), link) for link in links],
        "now": now,
    }


@own_account
def account(request: HttpRequest) -> HttpResponse:
    """How the person gets in."""
    user: User = request.user  # type: ignore[assignment]
    role = role_of(user)
    context = {
        **_access_of(user),
        "own_key": request.session.session_key,
        "asked_of_role": role in settings.SECOND_FACTOR_ROLES,
        "lacks_second_factor": lacks_second_factor(role, request.session),
        "has_password": user.has_usable_password(),
    }
    return render(request, "access/account.html", context)


@require_POST
@own_account
def session_end(request: HttpRequest, public_id: UUID) -> HttpResponse:
    _end_session(request, request.user, public_id)
    return redirect("account")


@require_POST
@own_account
def sessions_end(request: HttpRequest) -> HttpResponse:
    """All but the one that asks."""
    user: User = request.user  # type: ignore[assignment]
    key = request.session.session_key
    ended = end_sessions(user=user, but_key=key, actor=actor_of(request), now=timezone.now())
    messages.success(request, f"Ended {ended} other sessions. {IN_FORCE}" if ended else "There was no other session.")
    return redirect("account")


@requires("own.read")
@confirmed
def token_new(request: HttpRequest) -> HttpResponse:
    form = TokenForm(request.POST or None, role=role_of(request.user) or "")
    if request.method == "POST" and form.is_valid():
        try:
            issued = create_token(
                user_id=request.user.pk or 0,
                name=form.cleaned_data["name"],
                permissions=form.permissions(),
                days=form.cleaned_data["days"],
                actor=actor_of(request),
                now=timezone.now(),
            )
        except ValidationError as error:
            take_errors(form, error)
        else:
            context = {"token": issued.token, "secret": issued.secret, "base": request.build_absolute_uri("/")}
            return render(request, "access/token_secret.html", context)
    return render(request, "access/token_form.html", {"form": form}, status=400 if form.errors else 200)


@require_POST
@requires("own.read")
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    _revoke(request, request.user, token_id)
    return redirect("account")


@requires("member.read")
def member_access(request: HttpRequest, member_id: int) -> HttpResponse:
    """What an administrator sees of how somebody gets in."""
    member = member_for(member_id)
    return render(request, "access/member.html", {**_access_of(member.user), "member": member})


@require_POST
@requires("member.write")
def member_session_end(request: HttpRequest, member_id: int, public_id: UUID) -> HttpResponse:
    _end_session(request, member_for(member_id).user, public_id)
    return redirect("member-access", member_id)


@require_POST
@requires("member.write")
def member_sessions_end(request: HttpRequest, member_id: int) -> HttpResponse:
    member = member_for(member_id)
    ended = end_sessions(user=member.user, actor=actor_of(request), now=timezone.now())
    messages.success(request, f"Ended {ended} sessions of {member.user.username}. {IN_FORCE}")
    return redirect("member-access", member_id)


@require_POST
@requires("member.write")
def member_factors_remove(request: HttpRequest, member_id: int) -> HttpResponse:
    member = member_for(member_id)
    reason = reason_of(request)
    if not reason:
        messages.error(request, "Give a reason: somebody who signs in with less is worth one.")
        return redirect("member-access", member_id)
    removed = remove_factors(user=member.user, actor=actor_of(request), now=timezone.now(), reason=reason)
    said = (
        f"Removed the second factors of {member.user.username}; all sessions ended." if removed else "There was none."
    )
    messages.success(request, said)
    return redirect("member-access", member_id)


@require_POST
@requires("member.write")
def member_token_revoke(request: HttpRequest, member_id: int, token_id: int) -> HttpResponse:
    _revoke(request, member_for(member_id).user, token_id)
    return redirect("member-access", member_id)


def _end_session(request: HttpRequest, user: Any, public_id: UUID) -> None:
    ended = end_sessions(user=user, public_id=str(public_id), actor=actor_of(request), now=timezone.now())
    messages.success(request, f"Ended the session. {IN_FORCE}" if ended else "That session was over already.")


def _revoke(request: HttpRequest, user: Any, token_id: int) -> None:
    """Raises Http404 for a token that is not this person's."""
    token = get_object_or_404(PersonalToken.objects.select_related("user"), pk=token_id, user=user)
    revoke_token(token=token, actor=actor_of(request), now=timezone.now())
    messages.success(request, f"Revoked {token.name}: its next call is refused.")
