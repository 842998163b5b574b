"""The web process: pages and REST through Django, sockets through Channels, agents through small ASGI handlers."""

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from channels.sessions import CookieMiddleware
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

django_application = get_asgi_application()

from controlplane.exchange.asgi import ExchangeApplication  # noqa: E402 - needs the app registry
from controlplane.exchange.collector import spare_reports  # noqa: E402 - needs the app registry
from controlplane.exchange.protocol import ReportProtocol  # noqa: E402 - needs the app registry
from controlplane.jobs.upload_door import UploadDoor  # noqa: E402 - needs the app registry
from controlplane.live.protocol import LiveProtocol  # noqa: E402 - needs the app registry
from controlplane.live.urls import websocket_urlpatterns  # noqa: E402 - needs the app registry

exchange = ExchangeApplication(fallback=UploadDoor(fallback=django_application))


class HttpProtocol(ReportProtocol):
    """For uvicorn's `--http`: reports of agents go past ASGI. Without it everything works, at more work a report."""

    exchange = exchange


class WebSocketProtocol(LiveProtocol):
    """For uvicorn's `--ws`: frames are encoded and compressed once for all viewers. Without it each costs more."""


application = ProtocolTypeRouter(
    {
        "http": exchange,
        # The consumer finds out who it is by itself; a middleware for sessions would handle every frame.
        "websocket": AllowedHostsOriginValidator(CookieMiddleware(URLRouter(websocket_urlpatterns))),
    }
)
spare_reports()
