"""Who a socket belongs to, and whether that is still so: asked for all open sockets of a process at once.

A socket's session was checked in full when it was opened. From then on one statement a look reads what that check was
made from; only where something of it has changed the session is checked in full again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from channels.db import database_sync_to_async
from django.contrib.auth import get_user
from django.contrib.auth.models import AnonymousUser
from django.db.models.functions import MD5
from django.http import HttpRequest
from django.utils import timezone

from controlplane.access.models import Session
from controlplane.access.session_store import SessionStore
from controlplane.tenants.access import lacks_second_factor, member_of

log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
KEYS_AT_ONCE = 1_000

Traces = tuple[object, ...]
"""What a standing was made from, as it lies in the database."""


class Standing(NamedTuple):
    """What a session says of its owner: the role, and the own tenant of a tenant's member."""

    role: str
    tenant: str | None


class Checked(NamedTuple):
    """A standing, None for nobody, with what it was made from; that was read first, so a change in between shows."""

    standing: Standing | None
    traces: Traces | None


@database_sync_to_async
def check(session_key: str) -> Checked:
    """The session in full: read from its store, with the person's password, membership and second factor."""
    request = HttpRequest()
    request.session = SessionStore(session_key)
    if not request.session.session_key:
        return Checked(None, None)
    traces = read_traces([session_key]).get(session_key)
    # `get_user` checks the password's hash too
    user = get_user(request)
    if isinstance(user, AnonymousUser) or not user.is_active:
        return Checked(None, traces)
    member = member_of(user)
    if member is None or lacks_second_factor(member.role, request.session):
        return Checked(None, traces)
    return Checked(Standing(member.role, member.tenant.slug if member.tenant is not None else None), traces)


def read_traces(keys: Iterable[str]) -> dict[str, Traces]:
    """Session key -> traces, of sessions that have not expired. One statement for a thousand keys."""
    wanted = list(keys)
    found: dict[str, Traces] = {}
    for at in range(0, len(wanted), KEYS_AT_ONCE):
        rows = Session.objects.filter(
            session_key__in=wanted[at : at + KEYS_AT_ONCE], expire_date__gt=timezone.now()
        ).values_list(
            "session_key", MD5("session_data"), "user__password", "user__is_active", "user__member__role",
            "user__member__tenant__slug",
        )  # fmt: skip
        found |= {row[0]: row[1:] for row in rows}
    return found


class Watched(Protocol):
    """An open socket, as the watch sees it."""

    session_key: str

    @property
    def traces(self) -> Traces | None: ...

    def look(self) -> None:
        """Ends itself when its reader has not read for too long."""

    def doubt(self) -> None:
        """Its session changed: to be checked in full."""


class StandingWatch:
    """One per event loop: looks at all its sockets every other second while there are any."""

    def __init__(self) -> None:
        self._sockets: set[Watched] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._sockets)

    def add(self, socket: Watched) -> None:
        self._sockets.add(socket)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="live-standing")

    def remove(self, socket: Watched) -> None:
        self._sockets.discard(socket)

    async def _run(self) -> None:
        while self._sockets:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                await self.look()
            except Exception:
                log.exception("sessions of live sockets could not be looked at; the next look comes")

    async def look(self) -> None:
        """One look at all sockets."""
        sockets = list(self._sockets)
        for socket in sockets:
            socket.look()
        keys = {socket.session_key for socket in sockets}
        found = await database_sync_to_async(read_traces)(keys)
        for socket in sockets:
            if socket in self._sockets and found.get(socket.session_key) != socket.traces:
                socket.doubt()


_watches: WeakKeyDictionary[asyncio.AbstractEventLoop, StandingWatch] = WeakKeyDictionary()


def watch_of_process() -> StandingWatch:
    """The watch of the running event loop."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = StandingWatch()
    return watch
