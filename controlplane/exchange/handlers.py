"""The six things an agent can ask for; every handler takes verified bytes and gives a `Reply`."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
import psycopg
from django.conf import settings
from django.db import connections
from psycopg import Cursor

from controlplane.budgets.lease_settling import SpendReport, settle
from controlplane.budgets.leases import Asking, Granted, acquire, open_leases
from controlplane.core.period import to_us
from controlplane.exchange import enrolment, rekeying
from controlplane.exchange.answers import Outlook, compose, interval_ms, look
from controlplane.exchange.authentication import AgentDirectory, Caller, Headers, verified_at_hand
from controlplane.exchange.bounding import is_spend
from controlplane.exchange.catalogue import catalogue
from controlplane.exchange.database import connection
from controlplane.exchange.group_commit import GroupCommit, Groups, NotStored, store_group
from controlplane.exchange.job_funds import fund_request
from controlplane.exchange.messages import decode
from controlplane.exchange.problems import Refusal, Reply, fault, problem_reply
from controlplane.exchange.reports import JSON, Arrived, ReportTaker, incoming_of, not_stored, refuse
from controlplane.fleet.models import Slot
from controlplane.policy.queries import bundle, desired_for, kept_bundle, signing_keys
from controlplane.wire.enrolment import Enrol, Enrolled, Hello, Helloed
from controlplane.wire.lease import LeaseAnswer, LeaseRequest
from controlplane.wire.packed import FORM, is_packed
from controlplane.wire.rekeying import Rekey

T = TypeVar("T")

DIGEST = re.compile(r"[0-9a-f]{64}")
_IMMUTABLE = (b"cache-control", b"private, max-age=31536000, immutable")
# Bodies over this are parsed off the event loop.
_LARGE_BYTES = 256 * 1024


_enrol_decoder = msgspec.json.Decoder(Enrol)
_hello_decoder = msgspec.json.Decoder(Hello)
_lease_decoder = msgspec.json.Decoder(LeaseRequest)
_rekey_decoder = msgspec.json.Decoder(Rekey)


def _reply(document: Any) -> Reply:
    return Reply(200, msgspec.json.encode(document), (JSON,))


class Handlers:
    """Handlers of one process: threads for blocking work, the directory of agents and the group commit."""

    def __init__(self, group_commit: GroupCommit | None = None) -> None:
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="exchange")
        self.directory = AgentDirectory(self.blocking)
        self._group_commit = group_commit or GroupCommit()
        self._outlooks = OutlookGroup(self.blocking)
        taker = ReportTaker(self.directory, store_group, _look, lambda: datetime.now(UTC))
        self._report_groups: Groups[Arrived, Reply | None] = Groups(
            partial(_with_fresh_connection, taker.take),
            # who sent it is not known before it is verified: `take` keeps an agent's reports apart
            key=id,
            weight=Arrived.weight,
            failed=lambda error: problem_reply(fault().problem),
        )

    def offer(self, arrived: Arrived, done: Callable[[Reply | None], None]) -> None:
        """A whole report, unverified; `done` is called with the reply, or None when it has to take the long way."""
        loading = self.directory.refresh()
        if loading is None:
            self._report_groups.offer(arrived, done)
        else:
            loading.add_done_callback(partial(self._offer_known, arrived, done))

    def _offer_known(
        self, arrived: Arrived, done: Callable[[Reply | None], None], loading: asyncio.Future[None]
    ) -> None:
        if loading.cancelled() or loading.exception() is not None:
            done(None)
        else:
            self._report_groups.offer(arrived, done)

    def close(self) -> None:
        """Ends the threads; each has a connection of its own until then."""
        self._threads.shutdown()
        self._group_commit.close()
        self._report_groups.close()

    async def blocking(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Runs blocking work in a thread; a thread whose database connection broke gets a new one."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, partial(_with_fresh_connection, function, *arguments, **named))

    async def enrol(self, body: bytes) -> Reply:
        message = decode(_enrol_decoder, body, "The enrolment")
        admitted = await self.blocking(enrolment.enrol, message, now=datetime.now(UTC))
        keys = await self.blocking(signing_keys)
        return _reply(
            Enrolled(
                agent=admitted.uuid,
                agent_id=admitted.agent_id,
                pool=admitted.pool,
                installation=admitted.installation,
                signing_keys=keys,
                approved=admitted.approved,
                broker=settings.AGENT_BROKER_URL,
            )
        )

    async def hello(self, caller: Caller, body: bytes) -> Reply:
        message = decode(_hello_decoder, body, "The hello")
        now = datetime.now(UTC)
        # the key signed body and time: this one hello, however often it arrives
        mark = hashlib.sha256(b"%d\n%b" % (caller.at_us, body)).digest()
        greeted = await self.blocking(enrolment.hello, caller.agent.id, message, mark, now=now)
        self.directory.note_epoch(caller.agent.uuid, greeted.epoch)
        keys = await self.blocking(signing_keys)
        flex = await self.blocking(_has_flex, greeted.pool_id)
        return _reply(
            Helloed(
                epoch=greeted.epoch,
                agent_id=caller.agent.id,
                pool=greeted.pool,
                installation=greeted.installation,
                signing_keys=keys,
                accepted_through=greeted.accepted_through,
                interval_ms=interval_ms(flex=flex),
                server_time_us=to_us(now),
                broker=settings.AGENT_BROKER_URL,
                report_forms=[FORM],
                generation=greeted.generation,
            )
        )

    async def report(self, caller: Caller, body: bytes, headers: Headers, digest: bytes, received: datetime) -> Reply:
        given = (caller, body, headers, digest, to_us(received))
        if len(body) > _LARGE_BYTES and not is_packed(body):
            incoming = await self.blocking(incoming_of, *given)
        else:
            incoming = incoming_of(*given)
        try:
            result = await self._group_commit.submit(incoming)
            refuse(result, incoming)
            if caller.has_changed_its_key:
                await self._complete_rotation(caller)
            outlook = await self._outlooks.of(caller.agent.id, caller.agent.epoch)
        except (NotStored, psycopg.OperationalError) as error:
            raise not_stored() from error
        now = datetime.now(UTC)
        if outlook.live_number == incoming.report.live_number:
            return _reply(compose(incoming, result, outlook, now))
        return _reply(await self.blocking(compose, incoming, result, outlook, now))

    async def _complete_rotation(self, caller: Caller) -> None:
        try:
            await self.blocking(rekeying.complete, caller, datetime.now(UTC))
        finally:
            self.directory.forget()

    async def key(self, caller: Caller, body: bytes) -> Reply:
        message = decode(_rekey_decoder, body, "The new key")
        rekeyed = await self.blocking(rekeying.take, caller, message, datetime.now(UTC))
        self.directory.forget()
        return _reply(rekeyed)

    async def lease(self, caller: Caller, body: bytes) -> Reply:
        _own_epoch(caller)
        message = decode(_lease_decoder, body, "The lease request")
        amounts = (message.need_nanos, message.waiting_nanos)
        if not 0 < message.tenant_id < 2**31 or not all(0 <= nanos < 2**62 for nanos in amounts):
            raise Refusal("unreadable", "tenant_id, need_nanos and waiting_nanos must be positive numbers.")
        if not all(map(is_spend, message.spends)):
            raise Refusal("unreadable", "A spend has a lease_id or an amount that cannot be.")
        return _reply(await self.blocking(_lease, caller, message, datetime.now(UTC)))

    async def policy(self, caller: Caller, digest: str, if_none_match: bytes) -> Reply:
        # A push makes a whole pool pull at once: a thread for each would wait on the interpreter's lock.
        found = kept_bundle(caller.agent.pool_id, digest)
        if found is None and DIGEST.fullmatch(digest):
            found = await self.blocking(bundle, caller.agent.pool_id, digest)
        if found is None:
            raise Refusal("not_found", "This pool has no signed policy of this digest.")
        return _policy_reply(found, digest, if_none_match)

    def policy_at_hand(self, path: str, digest: str, headers: Headers) -> Reply | None:
        """The same at once where this process has agent and bundle at hand, unverified headers given; else None.

        Raises Refusal: bad_signature. A push makes all agents pull within a moment: this has no task and no wait.
        """
        if self.directory.refresh() is not None:
            return None
        caller = verified_at_hand(self.directory, "GET", path, headers, None, datetime.now(UTC))
        found = None if caller is None else kept_bundle(caller.agent.pool_id, digest)
        return None if found is None else _policy_reply(found, digest, headers.get(b"if-none-match", b""))


def _policy_reply(found: bytes, digest: str, if_none_match: bytes) -> Reply:
    etag = f'"{digest}"'.encode()
    headers = (JSON, (b"etag", etag), _IMMUTABLE)
    return Reply(304, b"", headers[1:]) if if_none_match == etag else Reply(200, found, headers)


def _with_fresh_connection(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    default = connections["default"]
    if default.errors_occurred:
        default.close_if_unusable_or_obsolete()
    return function(*arguments, **named)


def _has_flex(pool_id: int) -> bool:
    return Slot.objects.filter(pool_id=pool_id, band=Slot.Band.FLEX).exists()


def _own_epoch(caller: Caller) -> None:
    if caller.epoch != caller.agent.epoch:
        raise Refusal("superseded", "A newer process of this agent said hello. Stop this one.")


def _lease(caller: Caller, message: LeaseRequest, now: datetime) -> LeaseAnswer:
    asking = Asking(caller.agent.id, caller.epoch, message.tenant_id, message.need_nanos, message.waiting_nanos)
    with connection() as held, held.cursor() as cursor:
        _check_served(cursor, caller, message.tenant_id)
        if message.spends:
            with held.transaction():
                # its clock, which ends leases, comes with reports only: after ours they could still be spent there
                settle(cursor, [SpendReport(caller.agent.id, 0, message.spends)], now)
        with held.transaction():
            agent = (caller.agent.id, caller.epoch)
            of_job = message.job and fund_request(cursor, agent, message, now)
            granted = Granted(None, None) if of_job else acquire(cursor, asking, now, unless_held=True)
        leases = open_leases(cursor, [(caller.agent.id, caller.epoch)]).get(caller.agent.id, [])
    return LeaseAnswer(leases=leases, exhausted=[granted.exhausted] if granted.exhausted else [])


def _check_served(cursor: Cursor[Any], caller: Caller, tenant_id: int) -> None:
    """Raises Refusal: not_served for a tenant that neither the revision an agent runs nor the one it shall run has."""
    agent = caller.agent
    row = cursor.execute("SELECT revision FROM fleet_agentlive WHERE agent_id = %s", (agent.id,)).fetchone()
    wanted, _ = desired_for(cursor, [agent.id]).get(agent.id, (0, ""))
    revisions = {(agent.pool_id, wanted), *([(agent.pool_id, row[0])] if row else [])}
    if not catalogue.serves(cursor, revisions, tenant_id):
        raise Refusal(
            "not_served",
            f"The pool {agent.pool} does not serve tenant {tenant_id} in revision {wanted}."
            " Give the tenant a class of this pool and push.",
        )


class OutlookGroup:
    """Reads the outlook of many agents at once: those that ask while one reading runs are the next reading."""

    def __init__(self, blocking: Callable[..., Any]) -> None:
        self._blocking = blocking
        self._waiting: list[tuple[tuple[int, int], asyncio.Future[Outlook]]] = []
        self._task: asyncio.Task[None] | None = None

    async def of(self, agent_id: int, epoch: int) -> Outlook:
        """An outlook that holds this agent. Raises psycopg.OperationalError when the database is away."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outlook] = loop.create_future()
        self._waiting.append(((agent_id, epoch), future))
        if self._task is None:
            self._task = loop.create_task(self._read_all())
        return await future

    async def _read_all(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._read(batch)
        finally:
            self._task = None

    async def _read(self, batch: list[tuple[tuple[int, int], asyncio.Future[Outlook]]]) -> None:
        try:
            outlook = await self._blocking(_look, [pair for pair, _ in batch], datetime.now(UTC))
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for _, future in batch:
            if not future.done():
                future.set_result(outlook)


def _look(agents: list[tuple[int, int]], now: datetime) -> Outlook:
    with connection() as held:
        return look(held, agents, now)
