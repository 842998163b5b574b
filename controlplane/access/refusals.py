"""The page of a sign-in that did not work: what happened, and the way back."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render


def openid_failed(request: HttpRequest, detail: str, *, status: int) -> HttpResponse:
    return render(request, "access/sign_in_failed.html", {"detail": detail}, status=status)
