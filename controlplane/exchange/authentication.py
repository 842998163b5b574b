"""Who sends: agents by their public keys, from a snapshot of all agents that is at most two seconds old."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from msgspec import Struct

from controlplane.core.period import from_us, to_us
from controlplane.exchange.database import connection
from controlplane.exchange.problems import Refusal
from controlplane.fleet.keys import KEY_OVERLAP
from controlplane.wire import signing

log = logging.getLogger(__name__)

SNAPSHOT_AGE_S = 2.0
# An unknown id or epoch asks for a new snapshot, at most this often: a flood of wrong ids costs five queries a second.
RELOAD_PAUSE_S = 0.2

Headers = dict[bytes, bytes]


@dataclass(frozen=True, slots=True)
class KnownAgent:
    """An agent as the last snapshot had it."""

    id: int
    uuid: str
    name: str
    pool_id: int
    pool: str
    state: str
    public_key: bytes
    next_public_key: bytes | None
    next_key_at: datetime | None
    epoch: int

    def keys(self, now: datetime) -> list[bytes]:
        """The public keys whose signatures count at an instant: two in a rotation, the new one after its overlap."""
        if self.next_public_key is None or self.next_key_at is None:
            return [self.public_key]
        if now < self.next_key_at + KEY_OVERLAP:
            return [self.public_key, self.next_public_key]
        return [self.next_public_key]


class Caller(Struct, frozen=True):
    """A verified sender: `epoch` and `seq` are the signed headers; `seq` is None where the time `at_us` was signed."""

    agent: KnownAgent
    epoch: int
    seq: int | None
    public_key: bytes
    at_us: int = 0

    @property
    def has_changed_its_key(self) -> bool:
        """It signed with the key that it posted last, which is not its only one yet."""
        return self.public_key == self.agent.next_public_key


_SNAPSHOT_SQL = """
SELECT a.id, a.uuid::text, a.name, a.pool_id, p.slug, a.state, a.public_key, a.next_public_key, a.next_key_at, a.epoch
FROM fleet_agent a JOIN fleet_pool p ON p.id = a.pool_id
"""


def load_agents() -> dict[str, KnownAgent]:
    """Every agent by its UUID."""
    with connection() as held:
        rows = held.execute(_SNAPSHOT_SQL).fetchall()
    return {row[1]: _known(*row) for row in rows}


def _known(*row: Any) -> KnownAgent:
    agent_id, uuid, name, pool_id, pool, state, key, next_key, next_key_at, epoch = row
    known = None if next_key is None else bytes(next_key)
    return KnownAgent(agent_id, uuid, name, pool_id, pool, state, bytes(key), known, next_key_at, epoch)


class AgentDirectory:
    """The snapshot of agents; one load at a time, `run` takes the blocking load off the event loop."""

    def __init__(self, run: Callable[..., Awaitable[Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._agents: dict[str, KnownAgent] = {}
        self._loaded_at = float("-inf")
        self._loading: asyncio.Future[None] | None = None

    def at_hand(self, uuid: str, epoch: int) -> KnownAgent | None:
        """The agent as the newest snapshot has it, from any thread; None where `find` would load again for it.

        Whoever asks has seen to it by `refresh` that the snapshot is not too old.
        """
        agent = self._agents.get(uuid)
        return None if agent is None or epoch > agent.epoch else agent

    def refresh(self) -> asyncio.Future[None] | None:
        """Loads a snapshot that is half as old as it may be; the loading, where it has to be waited for."""
        age = self._clock() - self._loaded_at
        if age > SNAPSHOT_AGE_S / 2 and self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
            self._loading.add_done_callback(_say_if_failed)
        return self._loading if age > SNAPSHOT_AGE_S else None

    async def find(self, uuid: str, *, epoch: int | None = None, doubted: bool = False) -> KnownAgent | None:
        """The agent; a snapshot that is too old, lacks it or has an older epoch than `epoch` is loaded again.

        So is one that is `doubted` because no key in it fits: another process may have taken a new key a moment ago.
        """
        age = self._clock() - self._loaded_at
        agent = self._agents.get(uuid)
        doubtful = doubted or agent is None or (epoch is not None and epoch > agent.epoch)
        if age > SNAPSHOT_AGE_S or (doubtful and age > RELOAD_PAUSE_S):
            await self._reload()
        elif doubtful:
            await asyncio.sleep(RELOAD_PAUSE_S - age)
            if self._clock() - self._loaded_at >= RELOAD_PAUSE_S:
                await self._reload()
        return self._agents.get(uuid)

    def note_epoch(self, uuid: str, epoch: int) -> None:
        """This process issued an epoch: known at once, others learn it with the first report."""
        agent = self._agents.get(uuid)
        if agent is not None and agent.epoch < epoch:
            self._agents[uuid] = replace(agent, epoch=epoch)

    def forget(self) -> None:
        """This process changed what the snapshot says: the next request loads it again."""
        self._loaded_at = float("-inf")

    async def _reload(self) -> None:
        if self._loading is None:
            self._loading = asyncio.ensure_future(self._load())
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        try:
            started = self._clock()
            self._agents = await self._run(load_agents)
            self._loaded_at = started
        finally:
            self._loading = None


def _say_if_failed(loading: asyncio.Future[None]) -> None:
    if not loading.cancelled() and loading.exception() is not None:
        log.warning("agents could not be read: %s", loading.exception())


class Signed(Struct, frozen=True):
    """What the headers of a signed request say; `stamp` is the seq, or the time where there is none."""

    uuid: str
    epoch: int
    seq: int | None
    stamp: int
    signature: bytes


_AGENT, _EPOCH, _SEQ, _TIME, _SIGNATURE = (
    name.encode()
    for name in (
        signing.AGENT_HEADER,
        signing.EPOCH_HEADER,
        signing.SEQ_HEADER,
        signing.TIME_HEADER,
        signing.SIGNATURE_HEADER,
    )
)


def read_signed(headers: Headers) -> Signed:
    """What a request says of its sender. Raises Refusal: bad_signature where something is missing."""
    uuid, signature = headers.get(_AGENT, b""), headers.get(_SIGNATURE, b"")
    epoch, seq, time_us = _number(headers, _EPOCH), _number(headers, _SEQ), _number(headers, _TIME)
    stamp = seq if seq is not None else time_us
    if not uuid or not signature or epoch is None or stamp is None or (seq is not None and time_us is not None):
        raise Refusal(
            "bad_signature",
            f"Send {signing.AGENT_HEADER}, {signing.EPOCH_HEADER}, {signing.SIGNATURE_HEADER} and either"
            f" {signing.SEQ_HEADER} or {signing.TIME_HEADER}.",
        )
    return Signed(uuid.decode("ascii", "replace"), epoch, seq, stamp, _raw(signature))


def _number(headers: Headers, name: bytes) -> int | None:
    raw = headers.get(name)
    if raw is None:
        return None
    if not raw.isdigit() or len(raw) > 18:
        raise Refusal("bad_signature", f"The header {name.decode()} must be a whole number.")
    return int(raw)


def verified_at_hand(
    directory: AgentDirectory, method: str, path: str, headers: Headers, digest: bytes | None, now: datetime
) -> Caller | None:
    """The sender of a request whose body has this SHA-256 (None: no body), as `authenticate` would find it, from any
    thread.

    None where that takes a new snapshot or ends in another refusal. Raises Refusal: bad_signature.
    """
    signed = read_signed(headers)
    agent = directory.at_hand(signed.uuid, signed.epoch)
    if agent is None or agent.state != "active":
        return None
    if signed.seq is None and abs(signed.stamp - to_us(now)) > signing.TIME_TOLERANCE_US:
        return None
    message = signing.request_message(
        method=method, path=path, body=b"", epoch=signed.epoch, stamp=signed.stamp, digest=digest
    )
    key = _key_of(agent, signed.signature, message, now)
    if key is None:
        return None
    return Caller(agent, signed.epoch, signed.seq, key, at_us=signed.stamp if signed.seq is None else 0)


async def authenticate(
    directory: AgentDirectory,
    *,
    method: str,
    path: str,
    headers: Headers,
    body: bytes,
    digest: bytes | None = None,
    now_us: int,
) -> Caller:
    """The verified sender of a request. Raises Refusal: unknown_agent, retired or bad_signature.

    The signature covers method, path, the body as it was sent, the epoch and a seq; where there is no seq it covers a
    time, which must be within TIME_TOLERANCE_US of now. `digest` is the body's SHA-256, where it is known already.
    """
    signed, now = read_signed(headers), from_us(now_us)
    uuid, epoch, seq, raw = signed.uuid, signed.epoch, signed.seq, signed.signature
    agent = await directory.find(uuid, epoch=epoch)
    if agent is None:
        raise Refusal("unknown_agent", "No agent has this id. Enrol it with a new token from the Agents page.")
    message = signing.request_message(
        method=method, path=path, body=body, epoch=epoch, stamp=signed.stamp, digest=digest
    )
    key = _key_of(agent, raw, message, now)
    if key is None and raw:
        agent = await directory.find(uuid, doubted=True) or agent
        key = _key_of(agent, raw, message, now)
    if key is None:
        raise Refusal("bad_signature", "The request was not signed with a key that is good for this agent now.")
    if seq is None and abs(signed.stamp - now_us) > signing.TIME_TOLERANCE_US:
        raise Refusal("bad_signature", "The signed time is over 5 minutes off. Set this machine's clock (NTP).")
    if agent.state == "retired":
        raise Refusal("retired", f"The agent {agent.name} was retired. Enrol it again if it shall serve.")
    if agent.state != "active":
        raise Refusal("unknown_agent", f"The agent {agent.name} waits for approval on the Agents page.", status=403)
    return Caller(agent=agent, epoch=epoch, seq=seq, public_key=key, at_us=signed.stamp if seq is None else 0)


def _raw(signature: bytes) -> bytes:
    try:
        return signing.from_text(signature)
    except ValueError:
        return b""


def _key_of(agent: KnownAgent, signature: bytes, message: bytes, now: datetime) -> bytes | None:
    """The agent's key that made the signature, if one did that is good now."""
    for key in agent.keys(now):
        if signing.verify(key, signature, message):
            return key
    return None
