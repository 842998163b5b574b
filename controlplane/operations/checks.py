"""Mistakes of an installation's settings as system checks with ids: `manage.py check --deploy` explains them."""

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.checks import Warning as CheckWarning

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})


@register(Tags.security, deploy=True)
def secret_key_is_set(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    if settings.SECRET_KEY_IS_SET:
        return []
    return [
        Error(
            "No secret key is set: sessions end with each process.",
            hint="Put 50 random characters into a file and name it in FLEXBAND_SECRET_KEY_FILE.",
            id="flexband.E001",
        )
    ]


@register(Tags.security)
def plain_http_is_for_loopback(app_configs: Sequence[AppConfig] | None, **_: Any) -> list[CheckMessage]:
    """Plain http beside names that other machines can reach lets anybody on the way read the sessions."""
    open_hosts = sorted(set(settings.ALLOWED_HOSTS) - LOOPBACK)
    if not settings.INSECURE_LOOPBACK or not open_hosts:
        return []
    return [
        CheckWarning(
            f"FLEXBAND_INSECURE_LOOPBACK serves plain http, and the allowed hosts go beyond loopback: {open_hosts}.",
            hint="Unset it and serve https, or keep to loopback.",
            id="flexband.W002",
        )
    ]
