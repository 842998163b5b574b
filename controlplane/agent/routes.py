"""What the two listeners answer: tenants' API on one, metrics and health details on the other."""

from __future__ import annotations

from urllib.parse import unquote

import msgspec

from controlplane.agent.answers import error_body
from controlplane.agent.api_body import CHAT_PATH, TEXT_PATH, TOKEN_PATHS
from controlplane.agent.call import Call
from controlplane.agent.engine import Engine
from controlplane.agent.health import ControlState, health_details
from controlplane.agent.http_exchange import HttpExchange
from controlplane.agent.metrics import render
from controlplane.agent.model_list import is_models, models_answer
from controlplane.agent.one_shot_body import EMBEDDINGS_PATH, is_infer, is_one_shot, tensor_error
from controlplane.agent.readiness import SENTENCES, NotReady, expected_wait_us, not_ready
from controlplane.agent.spool_store import SpoolStore

_encode = msgspec.json.Encoder().encode


class TenantRoutes:
    """The OpenAI-compatible surface."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def handle(self, exchange: HttpExchange) -> None:
        path, method = exchange.path, exchange.method
        if path in TOKEN_PATHS and method == "POST":
            self._engine.desk.offer(exchange)
        elif path in TOKEN_PATHS or is_one_shot(path):
            if is_infer(path):
                exchange.error_form = tensor_error
            if method == "POST":
                self._engine.desk.offer(exchange)
            else:
                _wrong_method(exchange, "POST")
        elif is_models(path):
            self._models(exchange)
        elif path == "/healthz":
            exchange.respond(200, b"ok\n", content_type=b"text/plain")
        elif path == "/readyz":
            self._ready(exchange)
        else:
            served = f"{CHAT_PATH}, {TEXT_PATH} and {EMBEDDINGS_PATH}"
            message = f"There is nothing at {method} {path}. See /v1/models, {served}."
            exchange.respond(404, error_body(message, "invalid_request_error", "not_found"))

    def client_gone(self, call: Call) -> None:
        self._engine.client_gone(call)

    def _models(self, exchange: HttpExchange) -> None:
        engine = self._engine
        if exchange.method not in ("GET", "HEAD"):
            _wrong_method(exchange, "GET")
        elif not engine.registry.knows_keys:
            body = error_body(SENTENCES[NotReady.NO_KEYS], "server_error", "unavailable")
            exchange.respond(503, body, b"retry-after: 1\r\n")
        else:
            now_us = engine.clock.now_us()
            key = engine.registry.key_of(exchange.bearer, now_us)
            answer = models_answer(engine.registry, unquote(exchange.path), key, now_us)
            exchange.respond(answer.status, answer.body, answer.headers)

    def _ready(self, exchange: HttpExchange) -> None:
        engine = self._engine
        reason = not_ready(engine)
        if reason is not None:
            why = engine.closed_because() or f"No slot is ready. {engine.readiness.why}".strip()
            header = b"x-flexband-not-ready: %b\r\n" % reason.encode()
            exchange.respond(503, why.encode() + b"\n", header, b"text/plain")
        else:
            exchange.respond(200, b"ready\n", _wait_headers(engine), b"text/plain")


class AdminRoutes:
    """Metrics and health details, on their own listener (loopback by default)."""

    def __init__(self, engine: Engine, store: SpoolStore, control: ControlState) -> None:
        self._engine = engine
        self._store = store
        self._control = control

    def handle(self, exchange: HttpExchange) -> None:
        if exchange.method not in ("GET", "HEAD"):
            _wrong_method(exchange, "GET")
        elif exchange.path == "/metrics":
            page, content_type = render(self._engine, self._store, exchange.accept.decode("latin-1"))
            exchange.respond(200, page, content_type=content_type)
        elif exchange.path == "/healthz":
            exchange.respond(200, _encode(health_details(self._engine, self._store, self._control)))
        else:
            exchange.respond(404, error_body("See /metrics and /healthz.", "invalid_request_error", "not_found"))

    def client_gone(self, call: Call) -> None:
        """Nothing runs for an admin request."""


def _wait_headers(engine: Engine) -> bytes:
    """What an interactive request would wait here; none when no slot serves it."""
    document = engine.registry.document
    slug = "" if document is None else document.pool.interactive_class
    wait_us = expected_wait_us(engine, slug, engine.clock.now_us())
    if wait_us is None:
        return b""
    return b"x-flexband-class: %b\r\nx-flexband-estimated-wait-ms: %d\r\n" % (slug.encode(), wait_us // 1000)


def _wrong_method(exchange: HttpExchange, allowed: str) -> None:
    message = f"{exchange.path} takes {allowed}, not {exchange.method}."
    exchange.respond(405, error_body(message, "invalid_request_error", None), b"allow: %b\r\n" % allowed.encode())
