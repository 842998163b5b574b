"""The live socket: who may subscribe what, the protocol's limits, and the end of a session that was revoked.

Frames go to the transport as they came from the hub; the channel layer and its groups carry none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine
from typing import Any

import orjson
from channels.exceptions import StopConsumer
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from controlplane.live.hub import Hub, Viewer, hub_of_process
from controlplane.live.live_frame import LiveFrame
from controlplane.live.protocol import EXTENSION
from controlplane.live.standing import Checked, StandingWatch, Traces, check, watch_of_process
from controlplane.tenants.roles import Role, allows

REVOKED = 4001
TOO_MUCH = 4008
UNREADABLE = 4000
MESSAGE_BYTES_MAX = 8_192
MESSAGES_PER_10_S = 60
TOPICS_MAX = 64
SEND_DEADLINE_S = 20.0
TOPIC = re.compile(r"^(fleet|alerts|pool:[a-z0-9-]{1,63}|tenant:[a-z0-9-]{1,63}|rollout:[0-9]{1,9})$")


def may_subscribe(role: str | None, own_tenant: str | None, topic: str) -> bool:
    """Staff see every topic; a tenant's member sees its own tenant's and nothing else."""
    if not TOPIC.match(topic):
        return False
    if role == Role.TENANT:
        return topic == f"tenant:{own_tenant}"
    return role is not None and allows(role, "live.read")


class LiveConsumer(AsyncWebsocketConsumer):
    """`{"subscribe": [topics]}` in; snapshot, delta and error frames out. Subscribing again asks for a snapshot."""

    viewer: Viewer
    hub: Hub

    async def connect(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sending: float | None = None
        self._heard: list[float] = []
        self.session_key: str = self.scope["cookies"].get(settings.SESSION_COOKIE_NAME, "")
        self._checked: Checked = await check(self.session_key)
        if self._checked.standing is None:
            # Accepted first, so that the browser learns why: a refused handshake has no code.
            await self.accept()
            await self.close(code=REVOKED)
            return
        self.hub = hub_of_process(settings.REDIS_URL)
        straight = self.scope.get("extensions", {}).get(EXTENSION)
        self.viewer = Viewer(self._send_frame, straight["write"]) if straight else Viewer(self._send_frame)
        self._watch: StandingWatch = watch_of_process()
        await self.accept()
        self._start("pump", self.viewer.pump())
        self._watch.add(self)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.get_running_loop().create_task(work, name=f"live-{name}")

    async def disconnect(self, code: int) -> None:
        if self._tasks:
            self._watch.remove(self)
            self.hub.leave(self.viewer)
        for task in self._tasks.values():
            task.cancel()
        for task in self._tasks.values():
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        raise StopConsumer

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if not self._tasks or "end" in self._tasks:
            return
        if text_data is None or len(text_data) > MESSAGE_BYTES_MAX or self._too_often():
            await self.close(code=TOO_MUCH)
            return
        try:
            asked = orjson.loads(text_data)
            names = asked["subscribe"]
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            await self._error("", 'send {"subscribe": ["fleet"]}')
            return
        for name in dict.fromkeys(names):
            await self._subscribe(name)

    def _too_often(self) -> bool:
        now = time.monotonic()
        self._heard = [at for at in self._heard if now - at < 10]
        self._heard.append(now)
        return len(self._heard) > MESSAGES_PER_10_S

    async def _subscribe(self, name: str) -> None:
        standing = self._checked.standing
        if standing is None or not may_subscribe(standing.role, standing.tenant, name):
            await self._error(name[:80], "There is no such topic, or it is not yours to see.")
        elif len(self.viewer.topics) >= TOPICS_MAX and name not in self.viewer.topics:
            await self._error(name, f"A socket carries at most {TOPICS_MAX} topics.")
        else:
            self.hub.join(self.viewer, name)

    async def _error(self, topic: str, detail: str) -> None:
        frame = orjson.dumps({"type": "error", "topic": topic, "detail": detail})
        await self._send_frame(LiveFrame(frame))

    async def _send_frame(self, frame: LiveFrame) -> None:
        """Straight to the transport. It waits while the reader does not read; `look` bounds that."""
        self._sending = time.monotonic()
        await self.base_send(frame.message)
        self._sending = None

    # ---- still allowed, still reading: what the watch of the process asks of each socket ----

    @property
    def traces(self) -> Traces | None:
        return self._checked.traces

    def look(self) -> None:
        """A reader that has not read for too long is let go."""
        if self._sending is not None and time.monotonic() - self._sending > SEND_DEADLINE_S:
            self._end(TOO_MUCH)

    def doubt(self) -> None:
        """Something of the session changed: checked in full, and ended where it says something else now."""
        if "doubt" not in self._tasks or self._tasks["doubt"].done():
            self._start("doubt", self._check_again())

    async def _check_again(self) -> None:
        found = await check(self.session_key)
        if found.standing == self._checked.standing:
            self._checked = found
        else:
            self._end(REVOKED)

    def _end(self, code: int) -> None:
        """Nothing more is told from now on; the close itself waits, as a frame does, for who does not read."""
        self._watch.remove(self)
        self.hub.leave(self.viewer)
        if "end" not in self._tasks:
            self._start("end", self.close(code=code))
