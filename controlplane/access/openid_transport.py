"""Calls to OpenID providers go through the installation's one outbound client: public addresses only, no redirects."""

import io
from collections.abc import Mapping
from typing import Any

import requests
from django.conf import settings
from requests.adapters import BaseAdapter
from urllib3 import HTTPResponse

from controlplane.web import outbound

TIMEOUT_S = 10.0
BODY_BYTES_MAX = 512 * 1024


class OutboundAdapter(BaseAdapter):
    """A transport of `requests` that sends by `web.outbound`; what that refuses is a ConnectionError."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # type: ignore[override]
        body = request.body or b""
        try:
            answer = outbound.call(
                request.method or "GET", request.url or "", body if isinstance(body, bytes) else str(body).encode(),
                _texts(request.headers), allowed=settings.OUTBOUND_ALLOW, timeout_s=TIMEOUT_S,
                body_bytes_max=BODY_BYTES_MAX,
            )  # fmt: skip
        except (outbound.Refused, outbound.Unreachable) as error:
            raise requests.ConnectionError(str(error), request=request) from error
        if 300 <= answer.status < 400:
            raise requests.TooManyRedirects("the provider answers with a redirect: write its final address")
        response = requests.Response()
        response.status_code, response.url, response.request = answer.status, request.url or "", request
        response.headers.update(answer.headers)
        response.raw = HTTPResponse(body=io.BytesIO(answer.body), status=answer.status, preload_content=False)
        return response

    def close(self) -> None:
        """Nothing is kept open between calls."""


def session() -> requests.Session:
    """A session that knows no other way out, no proxy and no password file of the machine."""
    made = requests.Session()
    made.trust_env = False
    made.headers.pop("Accept-Encoding", None)
    for scheme in ("https://", "http://"):
        made.mount(scheme, OutboundAdapter())
    return made


def _texts(headers: Mapping[str, Any]) -> dict[str, str]:
    return {name: value.decode("latin-1") if isinstance(value, bytes) else value for name, value in headers.items()}
