"""Epochs of processes that are gone: in which order they are told, and what of their leases."""

from __future__ import annotations

import asyncio
import shutil

import msgspec
import pytest
from django.utils import timezone
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controlplane.agent import identity
from controlplane.agent.agent_process import AgentProcess
from controlplane.agent.journal_entries import Cut
from controlplane.agent.options import parse
from controlplane.agent.reporting import cut_last_report
from controlplane.agent.spool_store import SpoolStore
from controlplane.budgets.models import BudgetWindow
from controlplane.policy import signing
from controlplane.wire.report import LAYOUT, LeaseSpend, Report
from tests.agent import control_planes as cp
from tests.agent.test_spool import NOW_US, paid
from tests.agent.wire_client import WireClient, chat_body, post

FIRST = 4


class Books:
    """What a control plane makes of reports: totals of leases, closed with the epoch that they are of."""

    def __init__(self) -> None:
        self.settled: dict[int, int] = {}
        self.sealed: set[int] = set()

    def take(self, report: Report) -> None:
        for spend in report.spends:
            if spend.lease_id not in self.sealed:
                self.settled[spend.lease_id] = max(spend.spent_nanos, self.settled.get(spend.lease_id, 0))
        if report.seal:
            self.sealed.add(report.epoch)


class Life:
    """A process that says hello now and then, and whose requests are paid from the lease of any of its epochs.

    A lease has the number of its epoch.
    """

    def __init__(self, root, books: Books) -> None:
        self.store = SpoolStore(root)
        self.books = books
        self.totals: dict[int, int] = {}
        self.store.begin(FIRST, NOW_US)

    def step(self, step: str | tuple[int, int], number: int) -> None:
        spool = self.store.current
        if step == "hello":
            self.cut()
            self.store.begin(spool.epoch + 1, NOW_US)
        elif step == "report":
            self.cut()
        elif step == "taken" and spool.state.reports:
            stored = spool.state.reports[0]
            self.books.take(msgspec.json.decode(spool.body_of(stored), type=Report))
            spool.accept(stored.seq, NOW_US)
        elif isinstance(step, tuple):
            lease, nanos = min(FIRST + step[0], spool.epoch), step[1]
            self.totals[lease] = self.totals.get(lease, 0) + nanos
            spool.append(paid(f"r{number}", lease, self.totals[lease]))
            spool.flush()

    def cut(self) -> None:
        spool = self.store.current
        seq, spends = spool.state.last_seq + 1, [LeaseSpend(*total, 0) for total in self.totals.items()]
        body = msgspec.json.encode(Report(LAYOUT, spool.epoch, seq, NOW_US, 0, 0, spends=spends))
        spool.cut(Cut(seq, NOW_US, 0, False, body))


def succeed(root, books: Books) -> None:
    """The next process sends and seals what it finds, as `Control` does."""
    store = SpoolStore(root)
    store.recover()
    while (spool := store.next_to_send()) is not None:
        if not spool.state.reports:
            if spool.state.accepted and spool.state.accepted[-1].seal:
                spool.seal(NOW_US)
                continue
            cut_last_report(spool, NOW_US, store.spent_after(spool.epoch))
        stored = spool.state.reports[0]
        books.take(msgspec.json.decode(spool.body_of(stored), type=Report))
        spool.accept(stored.seq, NOW_US)
    store.close()


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 90)) | st.sampled_from(["report", "taken", "hello"]), max_size=20
    )
)
@example([(0, 5), "hello", (0, 7)])
@example([(0, 5), "hello", (0, 7), "report"])
def test_what_was_spent_of_any_epoch_is_known_before_its_seal(tmp_path_factory, steps):
    """Killed at any step after any number of hellos: no seal gives back what a journal has as spent."""
    root, books = tmp_path_factory.mktemp("spools"), Books()
    life = Life(root, books)
    for number, step in enumerate(steps):
        life.step(step, number)
    life.store.close()
    succeed(root, books)
    assert {lease: nanos for lease, nanos in books.settled.items() if nanos} == life.totals


def test_a_restored_control_plane_gets_a_sealed_epoch_again(tmp_path):
    store = SpoolStore(tmp_path)
    spool = store.begin(FIRST, NOW_US)
    for seq in (1, 2, 3):
        spool.cut(Cut(seq, NOW_US, 0, seq == 3, b"%d" % seq))
    spool.accept(3, NOW_US)
    spool.seal(NOW_US)
    store.close()
    store = SpoolStore(tmp_path)
    store.recover()
    assert store.next_to_send() is None
    store.accepted(FIRST, 3, NOW_US)
    assert store.next_to_send() is None, "a hello that tells what was known changes nothing"
    store.accepted(FIRST, 1, NOW_US)
    again = store.next_to_send()
    assert again is not None and [again.body_of(report) for report in again.state.reports] == [b"2", b"3"]
    again.accept(3, NOW_US)
    again.seal(NOW_US)
    assert store.next_to_send() is None
    store.accepted(99, 1, NOW_US)
    store.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("cut", [False, True], ids=["in the journal", "in a report that waits"])
async def test_spend_after_a_second_hello_is_settled_when_the_agent_is_killed(world, tmp_path, cut, long_lease_wait):
    """A request of the first epoch's lease ends under the second epoch, and nothing can be told before the kill."""
    await cp.in_database(cp.hard_budget)(world.tenant, 10**10)
    token = await cp.in_database(world.token)()
    state_dir = tmp_path / "state"
    async with cp.control_plane() as url:
        options = parse(cp.arguments(url, token, state_dir, "--sim-speed", "10"))
        process = AgentProcess(options, identity.load(state_dir))
        serving = asyncio.create_task(process.serve())
        await cp.until(lambda: process.control.epoch_now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.engine.ready)
        epoch = process.control.epoch_now()
        client = await WireClient.connect(process.port)
        client.send(post(chat_body(max_tokens=900, ignore_eos=True), key=cp.SECRET))
        await cp.until(lambda: process.engine.leases.reserved_nanos)
        await cp.in_database(signing.rotate)("policy", timezone.now())
        await cp.in_database(cp.push_policy)()
        await cp.until(lambda: process.control.epoch_now() == epoch + 1)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert process.engine.leases.reserved_nanos, "the request is paid from the first epoch's lease"
        assert (await client.answer()).status == 200
        if cut:
            process.control._cut(process.store.current)
        # What a kill leaves, to the byte: the process is not asked for anything more.
        shutil.copytree(state_dir, tmp_path / "killed")
        async with cp.running_agent(url, "", tmp_path / "killed") as successor:
            await cp.until(lambda: successor.control.epoch_now() == epoch + 2)
            await cp.until(lambda: not successor.store.unsealed())
            settled, leased = await cp.in_database(_window)()
            assert settled == await cp.charged() > 0
            assert leased == 0
        await process.end(orderly=False)


def _window() -> tuple[int, int]:
    """Nanos settled and out on lease."""
    return BudgetWindow.objects.values_list("settled_nanos", "leased_nanos").get()
