"""One's own password."""

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.forms import PasswordChangeForm
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.tenants import member_actions
from controlplane.tenants.access import requires


@requires("own.read")
def password(request: HttpRequest) -> HttpResponse:
    """One's own password; other sessions end, this one goes on."""
    user = User.objects.get(username=request.user.get_username())
    form = PasswordChangeForm(user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            member_actions.set_password(
                user_id=user.pk,
                password=form.cleaned_data["new_password1"],
                actor=actor_of(request),
                now=timezone.now(),
            )
        except ValidationError as error:
            form.add_error("new_password1", error.message_dict["password"][0])
        else:
            user.refresh_from_db()
            update_session_auth_hash(request, user)
            messages.success(request, "Changed your password. Your other sessions have ended.")
            return redirect("account")
    return render(request, "registration/password.html", {"form": form}, status=400 if form.errors else 200)
