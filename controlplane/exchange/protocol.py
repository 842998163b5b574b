"""Reports straight from uvicorn's parser: no task, no ASGI messages and no timer for each, taken in groups on threads.

A report of an agent that reports every second costs more to route than to store. This protocol hands complete reports
to `ReportGroups` and writes what comes back. A pull of a policy whose bundle is at hand is answered on the spot. Every
other request, and one with anything unusual about it, goes to the application as with uvicorn's own protocol. Start it
with `--http controlplane.config.asgi:HttpProtocol`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any, Final

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from controlplane.exchange.asgi import POLICY_PREFIX, READ_TIMEOUT_S, ExchangeApplication
from controlplane.exchange.problems import Refusal, Reply, fault, problem_reply
from controlplane.exchange.reports import PATH, Arrived

log = logging.getLogger(__name__)

_URL: Final = PATH.encode()
_POLICY: Final = re.compile(re.escape(POLICY_PREFIX.encode()) + rb"[0-9a-f]+")
_UNUSUAL: Final = frozenset((b"content-encoding", b"transfer-encoding", b"expect", b"upgrade"))


class _Nobody:
    """Stands for the event that an ASGI application would wait for."""

    def set(self) -> None:
        """Nobody waits."""


_NOBODY: Final = _Nobody()


class ReportCycle:
    """A report and its answer, in the place of uvicorn's cycle of request and response. `ready` is the answer where it
    is known already: to a request without a body.
    """

    __slots__ = (
        "disconnected", "headers", "held", "keep_alive", "message_event", "parts", "protocol", "ready",
        "response_complete", "size", "timer", "whole",
    )  # fmt: skip

    def __init__(
        self,
        protocol: ReportProtocol,
        headers: dict[bytes, bytes],
        *,
        keep_alive: bool,
        ready: Reply | None = None,
    ) -> None:
        self.protocol = protocol
        self.ready = ready
        self.headers = headers
        self.parts: list[bytes] = []
        self.size = 0
        self.held = protocol.exchange.room.hold()
        self.keep_alive = keep_alive
        self.whole = False
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NOBODY
        self.timer: asyncio.TimerHandle | None = None

    def answer(self, reply: Reply) -> None:
        """Writes the reply, unless the connection is gone."""
        self.held.release()
        protocol = self.protocol
        if self.disconnected or self.response_complete or protocol.transport.is_closing():
            return
        self.response_complete = True
        lines = [STATUS_LINE[reply.status]]
        for name, value in (*protocol.server_state.default_headers, *reply.headers):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"x-content-type-options: nosniff\r\ncontent-length: %d\r\n" % len(reply.body))
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        lines.append(reply.body)
        protocol.transport.write(b"".join(lines))
        if not self.keep_alive:
            protocol.transport.close()
        protocol.on_response_complete()


class ReportProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a short way for reports. Subclasses name the application as `exchange`."""

    exchange: ExchangeApplication
    cycle: Any

    def on_headers_complete(self) -> None:
        headers, ready = self._usual_headers(), None
        if headers is not None and self.url != _URL:
            ready = self.exchange.policy_at_hand(self.url.decode(), headers)
            headers = None if ready is None else headers
        if headers is None:
            super().on_headers_complete()
            return
        self.cycle = ReportCycle(self, headers, keep_alive=self.parser.should_keep_alive(), ready=ready)

    def _usual_headers(self) -> dict[bytes, bytes] | None:
        """The headers of a report, or of a pull of a policy, that may take the short way."""
        method, report = self.parser.get_method(), self.url == _URL
        if method != (b"POST" if report else b"GET") or self.parser.get_http_version() != "1.1":
            return None
        if not report and not _POLICY.fullmatch(self.url):
            return None
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        if self.root_path or self.limit_concurrency is not None or self._is_logged():
            return None
        if self.flow.write_paused:  # it does not read its answers: the usual way waits for that
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"" if report else b"0")
        most = settings.REPORT_BODY_LIMIT_BYTES if report else 0
        if not length.isdigit() or int(length) > most or b"x-flexband-agent" not in headers:
            return None
        return None if _UNUSUAL & headers.keys() else headers

    def _is_logged(self) -> bool:
        return self.access_log and self.access_logger.isEnabledFor(logging.INFO)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle = self.cycle
        if type(cycle) is not ReportCycle or cycle.whole or cycle.response_complete:
            return
        try:
            cycle.held.arriving(cycle.size)
        except Refusal as refusal:
            _stop(cycle)
            self._give_up(cycle, problem_reply(refusal.problem))
            return
        if cycle.timer is None:
            cycle.timer = self.loop.call_later(READ_TIMEOUT_S, self._stalled, cycle)

    def _stalled(self, cycle: ReportCycle) -> None:
        text = f"The body did not arrive within {READ_TIMEOUT_S:.0f} s."
        self._give_up(cycle, problem_reply(Refusal("unreadable", text, status=408).problem))

    def _give_up(self, cycle: ReportCycle, reply: Reply) -> None:
        """Answer before the body is whole: what is left of it is not waited for."""
        cycle.parts = []
        cycle.keep_alive = False
        cycle.answer(reply)

    def on_body(self, body: bytes) -> None:
        if type(self.cycle) is ReportCycle:
            if not self.cycle.response_complete:
                self.cycle.parts.append(body)
                self.cycle.size += len(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        cycle = self.cycle
        if type(cycle) is not ReportCycle:
            super().on_message_complete()
            return
        cycle.whole = True
        _stop(cycle)
        if cycle.ready is not None:
            cycle.answer(cycle.ready)
        elif not cycle.response_complete:
            parts, cycle.parts = cycle.parts, []
            arrived = Arrived(cycle.headers, parts[0] if len(parts) == 1 else b"".join(parts), time.time_ns() // 1000)
            try:
                cycle.held.whole(cycle.size)
                self.exchange.take_report(arrived, cycle.answer)
            except Refusal as refusal:
                cycle.answer(problem_reply(refusal.problem))
            except Exception as error:
                log.error("a report could not be taken", exc_info=error)
                cycle.answer(problem_reply(fault().problem))

    def connection_lost(self, exc: Exception | None) -> None:
        cycle = self.cycle
        if type(cycle) is ReportCycle:
            _stop(cycle)
            if not cycle.whole:
                cycle.held.release()
        super().connection_lost(exc)


def _stop(cycle: ReportCycle) -> None:
    if cycle.timer is not None:
        cycle.timer.cancel()
        cycle.timer = None
