"""Any order of leasing, finishing, losing, lapsing and cancelling: one result and one charge an item, nothing stuck."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from controlplane.core.batch_items import ATTEMPTS_MOST, FAILURES_MOST, ItemState
from controlplane.core.reasons import Outcome
from controlplane.exchange.database import close_pools
from controlplane.jobs.item_sweep import LAPSED_OFTEN, sweep_items
from controlplane.jobs.models import Item, ItemHolder, ItemResult, Job
from tests.jobs.batches import empty_items, running
from tests.jobs.settling import bring, done, lease
from tests.world import build_world

ITEMS = 6
FINAL = {ItemState.DONE, ItemState.PARKED, ItemState.CANCELLED}


class ItemMachine(RuleBasedStateMachine):
    """Three agents; what one was leased stays in its hands after the lease lapsed, and may come back at any time."""

    world = None

    def __init__(self) -> None:
        super().__init__()
        empty_items()
        ItemHolder.objects.all().delete()
        Job.objects.filter(has_items=True).update(state=Job.State.FAILED)
        self.job = running(self.world.tenant, ITEMS)
        self.now = timezone.now()
        self.hands: dict[int, list] = {1: [], 2: [], 3: []}
        self.through = {1: 0, 2: 0, 3: 0}
        self.charged: Counter[int] = Counter()

    @rule(agent=st.integers(1, 3), room=st.integers(1, 4), lost=st.booleans())
    def ask(self, agent, room, lost):
        found = lease(self.world, room, agent=agent, through=self.through[agent], now=self.now)
        assert [item.fence for item in found.items] == sorted({item.fence for item in found.items})
        assert all(item.fence > self.through[agent] for item in found.items)
        if not lost and found.items:
            self.hands[agent] += found.items
            self.through[agent] = found.items[-1].fence

    @precondition(lambda self: any(self.hands.values()))
    @rule(
        data=st.data(),
        how=st.sampled_from(["done", "done", "done", "failed", "verdict", "handed_back", "cancelled"]),
        keeps=st.booleans(),
    )
    def finish(self, data, how, keeps):
        agent = data.draw(st.sampled_from([agent for agent, items in self.hands.items() if items]))
        items = data.draw(st.lists(st.sampled_from(self.hands[agent]), unique_by=lambda item: item.fence, min_size=1))
        given = {
            "done": {},
            "failed": {"status": 502},
            "verdict": {"status": 400},
            "handed_back": {"status": 0, "outcome": Outcome.CANCELLED_BY_DRAIN},
            "cancelled": {"status": 499, "outcome": Outcome.CANCELLED_BY_CLIENT},
        }[how]
        ends = [done(item, reason=how, **given) for item in items]
        settled = bring(self.world, ends, agent=agent, now=self.now)
        lines = {end.request_id: end.line for end in ends}
        self.charged.update(lines[request] for request in settled.charged)
        if not keeps:
            gone = {item.fence for item in items}
            self.hands[agent] = [item for item in self.hands[agent] if item.fence not in gone]

    @rule(seconds=st.sampled_from([5, 100, 500]))
    def time_passes(self, seconds):
        self.now += timedelta(seconds=seconds)
        sweep_items(self.now)

    @rule()
    def cancel(self):
        Job.objects.filter(pk=self.job.pk, state="running").update(state="cancelled", finished_at=self.now)

    @invariant()
    def each_item_has_at_most_one_result_and_one_charge(self):
        assert Item.objects.filter(job_id=self.job.pk).count() == ITEMS
        assert all(count == 1 for count in self.charged.values()), self.charged
        by_state = dict(Item.objects.filter(job_id=self.job.pk).values_list("line", "state"))
        results = set(ItemResult.objects.filter(job_id=self.job.pk).values_list("line", flat=True))
        done_lines = {line for line, state in by_state.items() if state == ItemState.DONE}
        assert done_lines <= results
        assert all(self.charged[line] == 1 for line in done_lines)
        assert all(by_state[line] in (ItemState.DONE, ItemState.CANCELLED) for line in self.charged)
        assert max(Item.objects.values_list("failures", flat=True)) <= FAILURES_MOST

    @invariant()
    def the_job_counts_what_its_items_say(self):
        job = Job.objects.get(pk=self.job.pk)
        states = Counter(Item.objects.filter(job_id=job.pk).values_list("state", flat=True))
        counted = job.items_completed, job.items_parked, job.items_cancelled
        assert counted == (states[ItemState.DONE], states[ItemState.PARKED], states[ItemState.CANCELLED])
        assert (job.state == "completed") <= (job.items_completed + job.items_parked == job.items)

    def teardown(self):
        """Leases lapse, and one agent finishes what is left: nothing is stuck."""
        for _ in range(ITEMS * FAILURES_MOST):
            self.now += timedelta(seconds=10_000)
            sweep_items(self.now)
            found = lease(self.world, ITEMS, agent=9, through=0, now=self.now)
            settled = bring(self.world, [done(item) for item in found.items], agent=9, now=self.now)
            assert len(settled.charged) == len(found.items)
            if set(Item.objects.filter(job_id=self.job.pk).values_list("state", flat=True)) <= FINAL:
                return
        raise AssertionError(Counter(Item.objects.values_list("state", flat=True)))


@pytest.mark.django_db(transaction=True)
def test_the_life_of_items(settings_files):
    ItemMachine.world = build_world()
    try:
        run_state_machine_as_test(
            ItemMachine,
            settings=settings(
                max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        close_pools()


@pytest.fixture
def settings_files(settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")


@pytest.mark.parametrize("page", ["on-call.md", "runbooks/parked.md"])
def test_documents_quote_the_reason_of_lapsed_leases(page):
    said = LAPSED_OFTEN.format(attempts=ATTEMPTS_MOST).partition(":")[0]
    assert said in (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert f"lapsed {ATTEMPTS_MOST} times" in (Path(__file__).parents[2] / "docs" / "tenant.md").read_text("utf-8")
