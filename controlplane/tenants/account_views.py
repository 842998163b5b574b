"""Signing in and out, and one's own password."""

from typing import Any

from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.forms import AuthenticationForm, PasswordChangeForm
from django.contrib.auth.models import User
from django.contrib.auth.views import LoginView, LogoutView
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import actor_of
from controlplane.tenants import member_actions, throttle
from controlplane.tenants.access import public, requires


class SignIn(LoginView):
    """The sign-in page; a try over the limit is answered 429 without a look at the password."""

    template_name = "registration/login.html"
    form_class = AuthenticationForm
    redirect_authenticated_user = False

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        now = timezone.now()
        name, address = request.POST.get("username", "")[:150], request.META.get("REMOTE_ADDR", "")
        gate = throttle.enter(name, address, now)
        if not gate.open and gate.try_again_at is not None:
            wait_s = max(1, round((gate.try_again_at - now).total_seconds()))
            context = self.get_context_data(
                form=self.form_class(request, initial={"username": name}), try_again_at=gate.try_again_at, now=now
            )
            response = self.render_to_response(context, status=429)
            response.headers["Retry-After"] = str(wait_s)
            return response
        answer = super().post(request, *args, **kwargs)
        if answer.status_code == 302:
            throttle.forget(name, address, now)
        elif hasattr(answer, "status_code"):
            answer.status_code = 400
        return answer

    def get_default_redirect_url(self) -> str:
        return reverse("start")


sign_in = public(SignIn.as_view())
sign_out = public(LogoutView.as_view(next_page="login"))


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
            return redirect("start")
    return render(request, "registration/password.html", {"form": form}, status=400 if form.errors else 200)
