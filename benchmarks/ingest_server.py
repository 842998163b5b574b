"""The agents' door alone, for the benchmark: the same application that the web process mounts."""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django

django.setup()

from controlplane.exchange.asgi import ExchangeApplication  # noqa: E402 - needs the app registry
from controlplane.exchange.collector import spare_reports  # noqa: E402 - needs the app registry


async def _nothing(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


application = ExchangeApplication(fallback=_nothing)
spare_reports()
