"""A report from its bytes to its answer: opened, committed with others, answered from one look at the database.

What comes by `protocol.ReportProtocol` takes the short way, in groups on a thread; what that way cannot decide (an
agent that the snapshot lacks, a signature that its keys did not make, a key that changes) takes the long way of `asgi`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import msgspec
import psycopg
from django.db import OperationalError
from msgspec.structs import replace

from controlplane.core.period import to_us
from controlplane.exchange.answers import NO_SHARES, Outlook, compose
from controlplane.exchange.authentication import AgentDirectory, Caller, Headers, verified_at_hand
from controlplane.exchange.bounding import bounded, dropped_requests
from controlplane.exchange.composition import Result
from controlplane.exchange.group_commit import NotStored, Outcome
from controlplane.exchange.messages import Incoming, read_report
from controlplane.exchange.problems import Refusal, Reply, fault, problem_reply
from controlplane.usage.cursors import Envelope, Verdict
from controlplane.wire.packed import ROW
from controlplane.wire.report import SHARES_HEADER, Answer

log = logging.getLogger(__name__)

PATH: Final = "/agent/v1/report"
JSON: Final = (b"content-type", b"application/json")
WAIT_MAX_US: Final = 15_000_000
"""A report that waited longer for its turn is refused: its agent has given up on it."""
OF_EPOCH_MAX: Final = 4
"""Different reports of one epoch in a group. An agent waits for each answer before it sends the next."""
_SHARES: Final = SHARES_HEADER.encode()
_encode = msgspec.json.Encoder().encode


def incoming_of(caller: Caller, body: bytes, headers: Headers, digest: bytes, received_us: int) -> Incoming:
    """The report in a verified body. Raises Refusal: unreadable, must_upgrade, bad_signature, superseded."""
    report, packed = read_report(body, headers.get(b"content-type", b""))
    if caller.seq != report.seq or report.seq < 1 or not 0 < report.epoch <= 2**31 - 1:
        raise Refusal("bad_signature", "The signed seq is not the report's seq, or the report has no epoch.")
    if caller.epoch not in (report.epoch, caller.agent.epoch):
        raise Refusal("superseded", "The signed epoch is neither the report's nor this agent's present one.")
    given = report
    report, impossible = bounded(given)
    dropped = dropped_requests(given) if "items_done" in impossible else frozenset()
    lost_from = 0 if report.lost is None else report.lost.first_seq
    envelope = Envelope(caller.agent.id, report.epoch, report.seq, digest, caller.epoch, lost_from)
    shares_mark = headers.get(_SHARES, b"").decode("ascii", "replace")
    return Incoming(envelope, caller.agent.pool_id, report, received_us, impossible, packed, dropped, shares_mark)


def refuse(result: Result, incoming: Incoming) -> None:
    """Raises Refusal for every verdict that is not an acceptance."""
    envelope = incoming.envelope
    after = result.through + 1
    if result.verdict is Verdict.EXPECTED:
        raise Refusal("expected", f"Report {after} of epoch {envelope.epoch} comes next.", expected=after)
    if result.verdict is Verdict.CONFLICT:
        raise Refusal(
            "conflict",
            f"Report {envelope.seq} of epoch {envelope.epoch} was taken with other content. This one was kept aside.",
            expected=after,
        )
    if result.verdict is Verdict.SEALED:
        raise Refusal("sealed", f"Epoch {envelope.epoch} was closed at report {result.through}.", expected=after)
    if result.verdict is Verdict.SUPERSEDED:
        raise Refusal("superseded", "A newer process of this agent said hello. Stop this one.")
    if result.verdict is Verdict.UNKNOWN:
        raise Refusal("unknown_epoch", f"Epoch {envelope.epoch} was never issued to this agent. Say hello first.")


def not_stored() -> Refusal:
    """The agent keeps the report."""
    return Refusal("busy", "The report was not stored. Send the same bytes again.")


def _too_many() -> Refusal:
    return Refusal("busy", "Reports of this epoch are being taken. Send one at a time.", status=429)


@dataclass(slots=True)
class Arrived:
    """A report as it came: nothing of it is verified. `received_us` is when its last byte was here."""

    headers: Headers
    body: bytes
    received_us: int

    def weight(self) -> int:
        """About how many rows it has."""
        return 1 + len(self.body) // ROW.size


Store = Callable[[Sequence[Incoming], datetime], Sequence[Outcome]]
Look = Callable[[list[tuple[int, int]], datetime], Outlook]
Opened = tuple[int, Caller, Incoming]
"""With its position in the group."""


class ReportTaker:
    """Takes groups of reports, blocking."""

    def __init__(self, directory: AgentDirectory, store: Store, look: Look, clock: Callable[[], datetime]) -> None:
        self._directory = directory
        self._store = store
        self._look = look
        self._clock = clock

    def take(self, group: Sequence[Arrived], now: datetime) -> list[Reply | None]:
        """The reply to each, None for one that must take the long way."""
        replies: list[Reply | None] = [None] * len(group)
        accepted: list[tuple[Opened, Result]] = []
        firsts = _firsts(self._open_all(group, now, replies), replies)
        for opened in _apart([one for one, _ in firsts.values()]):
            outcomes = self._store([incoming for _, _, incoming in opened], now)
            for first, outcome in zip(opened, outcomes, strict=True):
                for one in (first, *firsts[first[0]][1]):
                    try:
                        accepted.append((one, _accepted(outcome if one is first else _again(outcome), one[2])))
                    except Refusal as refusal:
                        replies[one[0]] = problem_reply(refusal.problem)
        self._answer_all(accepted, replies)
        return replies

    def _open_all(self, group: Sequence[Arrived], now: datetime, replies: list[Reply | None]) -> list[Opened]:
        opened: list[Opened] = []
        now_us = to_us(now)
        for at, arrived in enumerate(group):
            try:
                if now_us - arrived.received_us > WAIT_MAX_US:
                    raise not_stored()
                found = self._open(arrived, now)
            except Refusal as refusal:
                replies[at] = problem_reply(refusal.problem)
                continue
            except Exception as error:
                replies[at] = _faulty(error)
                continue
            if found is not None:
                opened.append((at, *found))
        return opened

    def _open(self, arrived: Arrived, now: datetime) -> tuple[Caller, Incoming] | None:
        digest = hashlib.sha256(arrived.body).digest()
        caller = verified_at_hand(self._directory, "POST", PATH, arrived.headers, digest, now)
        if caller is None or caller.seq is None or caller.has_changed_its_key:
            return None
        return caller, incoming_of(caller, arrived.body, arrived.headers, digest, arrived.received_us)

    def _answer_all(self, accepted: Sequence[tuple[Opened, Result]], replies: list[Reply | None]) -> None:
        if not accepted:
            return
        agents = [(caller.agent.id, caller.agent.epoch) for (_, caller, _), _ in accepted]
        now = self._clock()
        try:
            answers = Answers(self._look(agents, now), now)
            for (at, _, incoming), result in accepted:
                replies[at] = _answer(incoming, result, answers)
        except (psycopg.OperationalError, OperationalError) as error:
            log.warning("reports were stored and not answered, their agents send them again: %s", error)
            for (at, _, _), _ in accepted:
                replies[at] = replies[at] or problem_reply(not_stored().problem)
        except Exception as error:
            # They are stored. What one agent's answer stumbles over is not to keep the others from theirs.
            if len(accepted) == 1:
                replies[accepted[0][0][0]] = _faulty(error)
                return
            for one in accepted:
                self._answer_all([one], replies)


@dataclass(slots=True)
class Answers:
    """The answers of one outlook. Those of agents that are told the same differ in `accepted_through` only."""

    outlook: Outlook
    now: datetime
    rests: dict[tuple[object, ...], bytes] = field(default_factory=dict)

    def written(self, incoming: Incoming, result: Result) -> bytes:
        """The JSON of `compose`."""
        outlook, agent_id = self.outlook, incoming.envelope.agent_id
        if any(agent_id in own for own in (outlook.leases, outlook.exhausted, outlook.grants, outlook.items)):
            return _encode(compose(incoming, result, outlook, self.now))
        mark = outlook.shares.get(agent_id, NO_SHARES).mark
        same = (
            outlook.desired.get(agent_id), outlook.facts.get(agent_id), mark, mark == incoming.shares_mark,
            incoming.report.live_number, result.verdict, result.set_aside,
        )  # fmt: skip
        rest = self.rests.get(same)
        if rest is None:
            whole = _encode(compose(incoming, result, outlook, self.now))
            rest = self.rests[same] = whole[len(_through(result)) :]
        return _through(result) + rest


def _through(result: Result) -> bytes:
    return b'{"accepted_through":%d' % result.through


assert Answer.__struct_encode_fields__[0] == "accepted_through"


def _answer(incoming: Incoming, result: Result, answers: Answers) -> Reply:
    try:
        return Reply(200, answers.written(incoming, result), (JSON,))
    except (psycopg.OperationalError, OperationalError):
        raise
    except Exception as error:
        return _faulty(error)


def _faulty(error: Exception) -> Reply:
    """For one report of a group: the others are not to suffer from it."""
    log.error("a report could not be handled", exc_info=error)
    return problem_reply(fault().problem)


def _firsts(opened: Sequence[Opened], replies: list[Reply | None]) -> dict[int, tuple[Opened, list[Opened]]]:
    """By position, the first of each report and its copies, which are repeats of it without a look at the database.

    Each report of an epoch is a transaction of its own: more than a few are refused.
    """
    firsts: dict[int, tuple[Opened, list[Opened]]] = {}
    of_epoch: dict[tuple[int, int], dict[tuple[int, bytes, int], int]] = defaultdict(dict)
    for one in opened:
        envelope = one[2].envelope
        known = of_epoch[(envelope.agent_id, envelope.epoch)]
        report = envelope.seq, envelope.digest, envelope.sender_epoch
        if report in known:
            firsts[known[report]][1].append(one)
        elif len(known) < OF_EPOCH_MAX:
            known[report] = one[0]
            firsts[one[0]] = one, []
        else:
            replies[one[0]] = problem_reply(_too_many().problem)
    return firsts


def _again(outcome: Outcome) -> Outcome:
    """What a copy of a report comes to."""
    if isinstance(outcome, NotStored) or outcome.verdict is not Verdict.TAKEN:
        return outcome
    return replace(outcome, verdict=Verdict.REPEAT, set_aside=0)


def _apart(opened: Sequence[Opened]) -> Iterator[list[Opened]]:
    """What may be one transaction each: of an agent's epoch one report, in the order they came."""
    while opened:
        first: dict[tuple[int, int], Opened] = {}
        for one in opened:
            first.setdefault((one[2].envelope.agent_id, one[2].envelope.epoch), one)
        yield list(first.values())
        taken = {at for at, _, _ in first.values()}
        opened = [one for one in opened if one[0] not in taken] if len(taken) < len(opened) else []


def _accepted(outcome: Outcome, incoming: Incoming) -> Result:
    if isinstance(outcome, NotStored):
        raise not_stored()
    refuse(outcome, incoming)
    return outcome
