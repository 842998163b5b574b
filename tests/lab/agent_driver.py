"""The agent's own engine under a virtual clock, fed with a workload: what the simulator is compared with.

Two ways: its calls one by one in the order that the simulator states (`drive`), and as asyncio code on a loop whose
time is virtual (`drive_loop`). Registry, live list with signed keys, spool, bodies and records are the real ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path

import msgspec

from controlplane.agent import engine as engine_module
from controlplane.agent.backends.base import Sink
from controlplane.agent.backends.request import BackendRequest, TokenUsage
from controlplane.agent.clock import Clock
from controlplane.agent.engine import Engine
from controlplane.agent.policy_state import LiveList
from controlplane.agent.spool import EpochSpool
from controlplane.core.reasons import BY_CODE, OUTCOME_CODES, Reason
from controlplane.lab.service import ServiceModel
from controlplane.lab.simulator import START_US, Simulator
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument
from controlplane.wire.report import Grant
from tests.agent import worlds

NEVER_US = 1 << 62
STEP_US = round(engine_module.STEP_S * 1e6)
CODES = {
    "queue_full": Reason.QUEUE_FULL, "wait_too_long": Reason.WAIT_TOO_LONG, "never_fits": Reason.NEVER_FITS,
    "concurrency_limit": Reason.CONCURRENCY_LIMIT, "rate_limit_exceeded": Reason.RATE_LIMIT,
    "context_length_exceeded": Reason.PROMPT_TOO_LONG, "class_not_allowed": Reason.CLASS_NOT_ALLOWED,
}  # fmt: skip


@dataclass
class Decided:
    """What became of the requests, by row, and the starts in their order: (instant, row, slot index)."""

    rows: dict[int, tuple] = field(default_factory=dict)
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    states: list[tuple[int, str, str]] = field(default_factory=list)
    """(instant, slot, state) of flex slots."""


class VirtualClock(Clock):
    def __init__(self) -> None:
        super().__init__()
        self.at_us = START_US

    def now_us(self) -> int:
        return self.at_us

    def adjust(self, *, idle: bool) -> None:
        """It is right."""


class LoopClock(VirtualClock):
    def now_us(self) -> int:
        return START_US + round(asyncio.get_running_loop().time() * 1e6)


class TimedRun:
    def __init__(self, cancelled) -> None:
        self.cancel = cancelled

    def usage_so_far(self) -> None:
        return None


class TimedBackend:
    """A model server that takes as long as a service model says; its ends are events of whoever drives."""

    cancels_promptly = True
    batches_itself = False

    def __init__(self, service: ServiceModel, clock: Clock, decided: Decided) -> None:
        self.service, self.clock, self.decided = service, clock, decided
        self.engine: Engine | None = None
        self.ends: list[tuple[int, int, Sink, TokenUsage]] = []
        self.gone: set[int] = set()
        self.number = 0
        self.on_loop = False

    async def open(self) -> None:
        """It is there."""

    async def close(self) -> None:
        """Nothing runs by itself."""

    def take_policy(self, document) -> None:
        """It runs what it is sent."""

    def set_slots(self, slots) -> None:
        """As many as the scheduler has."""

    def count_prompt(self, serialised: bytes) -> int:
        return len(serialised) - 2

    def start(self, request: BackendRequest, sink: Sink) -> TimedRun:
        said = json.loads(request.body)
        running = next(slot for slot in self.engine.scheduler.slots if int(slot.spec.name[1:]) == request.slot_id)
        now_us = self.clock.now_us()
        self.decided.starts.append((now_us, said["row"], running.index))
        output = min(said["output"], request.max_output_tokens)
        first_us, rest_us = self.service.parts(request.prompt_tokens, output, len(running.running))
        self.number += 1
        number, usage = self.number, TokenUsage(request.prompt_tokens, 0, output)
        sink.prefill_began()
        if self.on_loop:
            loop = asyncio.get_running_loop()
            handle = loop.call_at(
                (now_us - START_US + first_us + rest_us) / 1e6, lambda: sink.finished(usage, b'{"choices":[]}')
            )
            return TimedRun(handle.cancel)
        heappush(self.ends, (now_us + first_us + rest_us, number, sink, usage))
        return TimedRun(lambda: self.gone.add(number))


class Client:
    """The client's side of one request."""

    def __init__(self, row: int, workload: Workload, secrets: list[bytes]) -> None:
        self.row = row
        self.path, self.job, self.traceparent, self.call = "/v1/completions", "", b"", None
        self.bearer = secrets[workload.tenant_of[row]]
        self.asked_class = workload.classes[workload.class_of[row]]
        self.client_request_id = str(row)
        said = {
            "model": worlds.MODEL, "prompt": "x" * workload.prompt[row], "row": row, "output": workload.output[row],
        }  # fmt: skip
        if workload.asked[row]:
            said["max_tokens"] = workload.asked[row]
        self.body = json.dumps(said).encode()
        self.answer: tuple[int, bytes, bytes] | None = None

    def respond(
        self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json"
    ) -> None:
        self.answer = status, body, headers


def with_ids(document: PolicyDocument) -> PolicyDocument:
    """The document as the test's agent and its keys know it."""
    raw = msgspec.to_builtins(document)
    raw["installation"] = worlds.INSTALLATION
    raw["pool"]["slug"], raw["pool"]["model"] = worlds.POOL, worlds.MODEL
    for slot in raw["pool"]["slots"]:
        slot["agent_id"] = worlds.AGENT_ID
    return msgspec.convert(raw, PolicyDocument)


class Driven:
    """An engine with a policy and a key for each tenant."""

    def __init__(self, folder: Path, document: PolicyDocument, workload: Workload, service, clock, monkeypatch) -> None:
        self.decided, self.workload, self.clock = Decided(), workload, clock
        self.backend = TimedBackend(service, clock, self.decided)
        monkeypatch.setattr(engine_module, "boot_us", clock.now_us)
        folder.mkdir(exist_ok=True)
        self.engine = self.backend.engine = Engine(
            clock=clock, backend=self.backend, agent_id=worlds.AGENT_ID, state_dir=folder
        )
        self.spool = self.engine.spool = EpochSpool.create(folder / "spool", 1, clock.now_us())
        live = LiveList(folder)
        secrets = [f"secret-{tenant}".encode() for tenant in workload.tenants]
        ids = {tenant.slug: tenant.id for tenant in document.tenants}
        keys = [
            worlds.live_key(number, id=number, tenant_id=ids[slug], hashes=[hashlib.sha256(secret).hexdigest()],
                            public_id=f"k{number}", classes=[klass.slug for klass in document.classes],
                            default_class=document.classes[0].slug)
            for number, (slug, secret) in enumerate(zip(workload.tenants, secrets), start=1)
        ]  # fmt: skip
        assert live.apply(worlds.delta(*keys), worlds.trust()) and live.apply(None, worlds.trust())
        self.engine.apply_policy(document, live)
        host = self.engine.flex._host
        inner = host.set_slot_state

        def noted(name, state) -> None:
            self.decided.states.append((clock.now_us(), name, state.value))
            inner(name, state)

        host.set_slot_state = noted
        self.clients = [Client(row, workload, secrets) for row in range(len(workload))]
        self.calls = {}

    def offer(self, row: int) -> None:
        client = self.clients[row]
        self.engine.desk.offer(client)
        if client.call is not None:
            self.calls[row] = client.call

    def grant(self, slot_id: int, fence: int, action: str, ttl_us: int) -> None:
        grant = Grant(slot_id=slot_id, fence=fence, action=action, ttl_us=ttl_us)
        self.engine.flex.apply([grant], sent_boot_us=self.clock.now_us())
        self.engine.pump(self.clock.now_us())

    def collect(self) -> Decided:
        """Read the records, and the answers to what was refused."""
        self.engine._flush()
        closed = {int(entry.row.client_request_id): entry.row for entry in self.spool.state.closed}
        for row, client in enumerate(self.clients):
            if row in self.calls:
                call, record = self.calls[row], closed.get(row)
                wait_us = -1 if call.estimated_wait_us is None else call.estimated_wait_us
                ended = (
                    (0, -1, 0, 0)
                    if record is None
                    else (record.outcome, record.ended_us, record.gpu_us, record.attempt)
                )
                self.decided.rows[row] = (*ended, call.first_dispatch_us or -1, wait_us)
            else:
                _, body, headers = client.answer
                lines = dict(line.split(b": ", 1) for line in headers.strip().split(b"\r\n"))
                code = CODES[json.loads(body)["error"]["code"]].code
                wait_ms = int(lines.get(b"x-flexband-estimated-wait-ms", -1))
                self.decided.rows[row] = (code, wait_ms, int(lines.get(b"retry-after", -1)))
        return self.decided


async def drive(folder: Path, document, workload: Workload, service, monkeypatch, grants=()) -> Decided:
    """The engine's calls one by one: at one instant ends, arrivals, its step, then grants."""
    clock = VirtualClock()
    driven = Driven(folder, document, workload, service, clock, monkeypatch)
    ends, gone = driven.backend.ends, driven.backend.gone
    row, step_us, later = 0, START_US + STEP_US, sorted(grants)
    horizon_us = START_US + horizon(workload, document)
    while True:
        end_us = ends[0][0] if ends else NEVER_US
        arrival_us = START_US + workload.at_us[row] if row < len(workload) else NEVER_US
        grant_us = START_US + later[0][0] if later else NEVER_US
        clock.at_us = at_us = min(end_us, arrival_us, grant_us, step_us)
        if at_us > horizon_us:
            break
        if end_us == at_us:
            _, number, sink, usage = heappop(ends)
            if number not in gone:
                sink.finished(usage, b'{"choices":[]}')
        elif arrival_us == at_us:
            driven.offer(row)
            row += 1
        elif step_us == at_us:
            driven.engine.step()
            step_us += STEP_US
        else:
            _, *grant = later.pop(0)
            driven.grant(*grant)
        await asyncio.sleep(0)
    driven.spool.close()
    return driven.collect()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time jumps to the next timer as soon as nothing is ready."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._virtual_s = max(self._virtual_s, self._scheduled[0]._when)
        super()._run_once()


def drive_loop(folder: Path, document, workload: Workload, service, monkeypatch, grants=()) -> Decided:
    """The engine with its own timer on a loop whose time is virtual."""
    loop = VirtualLoop()

    async def whole() -> Decided:
        clock = LoopClock()
        driven = Driven(folder, document, workload, service, clock, monkeypatch)
        driven.backend.on_loop = True
        driven.engine.start(driven.spool)
        for row in range(len(workload)):
            loop.call_at(workload.at_us[row] / 1e6, driven.offer, row)
        for at_us, *grant in grants:
            loop.call_at(at_us / 1e6, driven.grant, *grant)
        await asyncio.sleep(horizon(workload, document) / 1e6)
        driven.engine.stop()
        driven.spool.close()
        return driven.collect()

    try:
        return loop.run_until_complete(whole())
    finally:
        loop.close()


def horizon(workload: Workload, document) -> int:
    """Long enough for everything to end, and off the grid of the steps."""
    longest_s = max(klass.stage_timeout_s for klass in document.classes)
    return (workload.at_us[-1] if len(workload) else 0) + 2 * longest_s * 1_000_000 + 1


def simulate(document, workload: Workload, service, grants=()) -> Decided:
    """The simulator on the same events, in the same form."""
    lab, starts = Simulator(document, workload, service), []
    lab.on_start = lambda now_us, row, slot: starts.append((now_us, row, slot))

    def grant(slot_id: int, fence: int, action: str, ttl_us: int) -> None:
        message = Grant(slot_id=slot_id, fence=fence, action=action, ttl_us=ttl_us)
        lab.flex.apply([message], sent_boot_us=lab.now_us())
        lab.pump(lab.now_us())

    for at_us, *rest in sorted(grants):
        lab.at(START_US + at_us, lambda rest=rest: grant(*rest))
    lab.run(horizon(workload, document))
    decided, columns = Decided(starts=starts), lab.columns
    for row in range(len(workload)):
        code = columns.code[row]
        if isinstance(BY_CODE.get(code), Reason):
            wait_us = columns.wait_estimate_us[row]
            decided.rows[row] = (code, -1 if wait_us < 0 else wait_us // 1000, columns.retry_s[row])
        else:
            ended = (code, columns.ended_us[row], columns.gpu_us[row], columns.attempts[row]) if code else (0, -1, 0, 0)
            decided.rows[row] = (*ended, columns.started_us[row], columns.wait_estimate_us[row])
    flex = {slot.name for slot in document.pool.slots if slot.band == "flex"}
    moves = [
        (at_us, name, state.value) for name, moves in lab.timeline.moves.items() for at_us, state in moves[1:]
        if name in flex
    ]  # fmt: skip
    decided.states = sorted(moves)
    return decided


def code_names(codes) -> dict[str, int]:
    """For a failure's message, and to see that a run had something of everything."""
    found: dict[str, int] = {}
    for code in codes:
        name = "unended" if not code else BY_CODE[code].value
        found[name] = found.get(name, 0) + 1
    return found


__all__ = ["OUTCOME_CODES", "code_names", "drive", "drive_loop", "simulate", "with_ids"]
