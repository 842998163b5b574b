"""The live socket: who may subscribe what, the protocol's limits, and the end of a session that was revoked.

Frames go to the transport as they came from the hub; the channel layer and its groups carry none of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

import orjson
from channels.db import database_sync_to_async
from channels.exceptions import StopConsumer
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest

from controlplane.live.hub import Hub, Viewer, hub_of_process
from controlplane.tenants.access import lacks_second_factor, member_of
from controlplane.tenants.roles import Role, allows

REVOKED = 4001
TOO_MUCH = 4008
UNREADABLE = 4000
CHECK_EVERY_S = 2.0
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
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: float | None = None
        self._heard: list[float] = []
        standing = await self._standing()
        if standing is None:
            # Accepted first, so that the browser learns why: a refused handshake has no code.
            await self.accept()
            await self.close(code=REVOKED)
            return
        self._role, self._tenant = standing
        self.hub = hub_of_process(settings.REDIS_URL)
        self.viewer = Viewer(self._send_frame)
        await self.accept()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.viewer.pump(), name="live-pump"),
            loop.create_task(self._keep_watch(), name="live-watch"),
        ]

    async def disconnect(self, code: int) -> None:
        for task in self._tasks:
            task.cancel()
        if hasattr(self, "viewer"):
            self.hub.leave(self.viewer)
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        raise StopConsumer

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if not self._tasks:
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
        if not may_subscribe(self._role, self._tenant, name):
            await self._error(name[:80], "There is no such topic, or it is not yours to see.")
        elif len(self.viewer.topics) >= TOPICS_MAX and name not in self.viewer.topics:
            await self._error(name, f"A socket carries at most {TOPICS_MAX} topics.")
        else:
            self.hub.join(self.viewer, name)

    async def _error(self, topic: str, detail: str) -> None:
        frame = orjson.dumps({"type": "error", "topic": topic, "detail": detail})
        await self._send_frame(frame)

    async def _send_frame(self, frame: bytes) -> None:
        """Straight to the transport. It waits while the reader does not read; `_keep_watch` bounds that."""
        self._sending = time.monotonic()
        await self.base_send({"type": "websocket.send", "text": frame.decode()})
        self._sending = None

    # ---- still allowed, still reading ----

    async def _keep_watch(self) -> None:
        """Every other second: is the session still good and the role the same; does the reader still read."""
        own = asyncio.current_task()
        # A call into a thread that had begun takes a cancellation for itself: the count still says so.
        while own is not None and not own.cancelling():
            await asyncio.sleep(CHECK_EVERY_S)
            standing = await self._standing()
            if own.cancelling():
                return
            if standing != (self._role, self._tenant):
                self.hub.leave(self.viewer)
                await self.close(code=REVOKED)
                return
            if self._sending is not None and time.monotonic() - self._sending > SEND_DEADLINE_S:
                self.hub.leave(self.viewer)
                await self.close(code=TOO_MUCH)
                return

    @database_sync_to_async
    def _standing(self) -> tuple[str, str | None] | None:
        """(role, own tenant) as the session says now; None when it says nothing any more."""
        session = self.scope.get("session")
        if session is None or not session.session_key:
            return None
        # the session, read again from its store: `get_user` checks the password's hash too
        request = HttpRequest()
        request.session = session.__class__(session.session_key)
        user = get_user(request)
        if isinstance(user, AnonymousUser) or not user.is_active:
            return None
        member = member_of(user)
        if member is None or lacks_second_factor(member.role, request.session):
            return None
        return member.role, member.tenant.slug if member.tenant is not None else None
