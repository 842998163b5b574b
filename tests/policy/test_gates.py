"""Waves with gates on real rows: what stops them, what they wait for, and that a stopped one is rolled back once."""

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.contracts.models import Contract, ContractVersion, ObjectiveMinute
from controlplane.core.period import to_us
from controlplane.fleet.models import AgentLive
from controlplane.policy import rollouts, watch
from controlplane.policy.actions import push, send_next_wave
from controlplane.policy.models import Revision, WatchedCount
from controlplane.policy.pages import rollout_page
from controlplane.policy.wave_plan import Gates, WavePlan
from controlplane.wire.report import ObjectiveCount
from tests.policy.conftest import Listeners, make_fleet, wait_for
from tests.policy.test_rollouts import acks, states, wanted

HOLD = 60
GATES = Gates(hold_s=HOLD, gate_timeout_s=300, burn_most=6.0)


@pytest.fixture(autouse=True)
def nothing_known():
    watch.forget()
    yield
    watch.forget()


@pytest.fixture
def fleet(db, no_broker):
    return make_fleet(4)


@pytest.fixture
def good(fleet, actor, now):
    """A revision that everybody applies, and a change that was not pushed yet."""
    revision = push(actor=actor, reason="x", now=now)
    rollouts.run(revision.rollout.pk, now)
    speak(fleet.agents, now, revision.number)
    acks(revision.number, fleet.agents, now)
    rollouts.sweep(now)
    fleet.tenant.weight = 9
    fleet.tenant.save(update_fields=["weight"])
    return revision


def contract(fleet, now) -> ContractVersion:
    row = Contract.objects.create(slug="chat-ttft", name="x", workload_class=fleet.classes[0], created_at=now)
    return ContractVersion.objects.create(
        contract=row, number=1, effective_from=now - timedelta(days=1), target_ppm=990_000, threshold_ms=800,
        created_by="x", created_at=now,
    )  # fmt: skip


def speak(agents, at, revision: int = 0) -> None:
    for agent in agents:
        values = {"epoch": 1, "seq": 1, "reported_at": at, "revision": revision}
        AgentLive.objects.update_or_create(agent=agent, defaults=values)


def count(agent, version, at, *, total: int, bad: int) -> int:
    good = total - bad
    minute_us = to_us(at.replace(second=0, microsecond=0))
    row = ObjectiveCount(version.pk, minute_us, total, total, good, good, 0, {"threshold": bad} if bad else {})
    watch.forget()
    with connection.cursor() as cursor:
        return watch.note_counts(cursor, [(agent.pk, row)])


def begin(fleet, actor, now, gates=GATES, waves=(25, 100)):
    """The first wave of one agent, applied."""
    revision = push(actor=actor, reason="y", now=now, waves=waves, gates=gates)
    rollouts.run(revision.rollout.pk, now)
    first = [row.agent for row in revision.rollout.deliveries.filter(wave=1)]
    acks(revision.number, first, now)
    return revision, first


def seen(revision) -> tuple[str, str]:
    revision.rollout.refresh_from_db()
    return revision.rollout.state, revision.rollout.note


def after(revision) -> list[Revision]:
    return list(Revision.objects.filter(number__gt=revision.number))


class TestBurn:
    def test_agents_that_burn_stop_the_wave_and_bring_the_content_before_it_back(self, fleet, good, actor, now):
        version = contract(fleet, now)
        bad, first = begin(fleet, actor, now)
        later = now + timedelta(seconds=90)
        assert count(first[0], version, later, total=200, bad=20) == 1
        speak(fleet.agents, later)
        rollouts.sweep(later)
        rollouts.sweep(later)
        state, note = seen(bad)
        assert state == "stopped"
        assert note == "wave 1: contract chat-ttft burns at 10.0 there, 6 is the limit"
        [back] = after(bad)
        assert (back.rolls_back_from, back.rolls_back_to, back.digest) == (bad.number, good.number, good.digest)
        assert note in back.reason
        assert AuditEntry.objects.filter(action="policy.rollback", object_id=str(back.number)).count() == 1
        assert states(bad.rollout)[1:] == ["timed_out"] * 3 or states(bad.rollout)[1:] == ["pending"] * 3

    def test_the_same_requests_served_well_let_the_next_wave_go_after_its_hold(self, fleet, good, actor, now):
        version = contract(fleet, now)
        revision, first = begin(fleet, actor, now)
        later = now + timedelta(seconds=90)
        count(first[0], version, now + timedelta(seconds=60), total=200, bad=1)
        speak(fleet.agents, now + timedelta(seconds=HOLD - 1))
        rollouts.sweep(now + timedelta(seconds=HOLD - 1))
        assert states(revision.rollout).count("sent") == 0
        speak(fleet.agents, later)
        rollouts.sweep(later)
        assert states(revision.rollout).count("sent") == 3
        assert revision.rollout.waves.get(number=1).passed_at == later

    def test_without_requests_it_waits_then_asks_and_a_person_lets_it_go(self, fleet, good, actor, now):
        version = contract(fleet, now)
        ObjectiveMinute.objects.create(
            contract_version_id=version.pk, pool_id=fleet.pool.pk, minute=now - timedelta(minutes=5), offered=500
        )
        revision, _ = begin(fleet, actor, now)
        for seconds, asks in ((HOLD, False), (HOLD + 299, False), (HOLD + 300, True), (50_000, True)):
            at = now + timedelta(seconds=seconds)
            speak(fleet.agents, at)
            rollouts.sweep(at)
            state, note = seen(revision)
            assert (state, "waits for a person" in note) == ("running", asks), seconds
        send_next_wave(rollout_id=revision.rollout.pk, actor=actor, reason="night", now=at)
        assert states(revision.rollout).count("sent") == 3

    def test_only_whole_minutes_under_the_new_revision_of_watched_agents_count(self, fleet, good, actor, now):
        version = contract(fleet, now)
        begun = now + timedelta(seconds=10)
        revision, first = begin(fleet, actor, begun)
        assert count(first[0], version, now, total=9, bad=9) == 0
        assert count(fleet.agents[-1], version, now + timedelta(minutes=2), total=9, bad=9) == 0
        assert count(first[0], version, now + timedelta(minutes=1), total=5, bad=1) == 1
        assert count(first[0], version, now + timedelta(minutes=2), total=7, bad=0) == 1
        row = WatchedCount.objects.get()
        assert (row.rollout_id, row.offered, row.good, row.bad) == (revision.rollout.pk, 12, 11, 1)

    def test_with_nothing_under_way_a_report_costs_one_question_a_second(
        self, fleet, good, actor, now, django_assert_num_queries
    ):
        version = contract(fleet, now)
        count(fleet.agents[0], version, now, total=1, bad=0)
        row = ObjectiveCount(version.pk, to_us(now), 1, 1, 1, 1, 0, {})
        with django_assert_num_queries(0), connection.cursor() as cursor:
            assert watch.note_counts(cursor, [(fleet.agents[0].pk, row)]) == 0


class TestSilence:
    def test_an_agent_that_falls_silent_after_it_applied_it_stops_the_rollout(self, fleet, good, actor, now):
        bad, first = begin(fleet, actor, now, Gates(hold_s=600, burn_most=None))
        at = now + timedelta(seconds=59)
        speak([agent for agent in fleet.agents if agent not in first], at)
        rollouts.sweep(at)
        assert seen(bad)[0] == "running"
        at = now + timedelta(seconds=60)
        speak([agent for agent in fleet.agents if agent not in first], at)
        rollouts.sweep(at)
        assert seen(bad) == ("stopped", "wave 1: 1 agent fell silent after it was sent, 0 may")
        assert after(bad)[0].digest == good.digest

    def test_when_nobody_is_heard_the_silence_is_not_the_revisions(self, fleet, good, actor, now):
        revision, _ = begin(fleet, actor, now, Gates(hold_s=600, burn_most=None))
        rollouts.sweep(now + timedelta(seconds=300))
        assert seen(revision)[0] == "running"
        assert not after(revision)


class TestRefusals:
    def test_as_many_as_allowed_pass_and_one_more_stops(self, fleet, good, actor, now):
        gates = Gates(hold_s=0, refusals_most=1, burn_most=None)
        revision = push(actor=actor, reason="y", now=now, waves=(75, 100), gates=gates)
        rollouts.run(revision.rollout.pk, now)
        first = [row.agent for row in revision.rollout.deliveries.filter(wave=1).order_by("agent__name")]
        acks(revision.number, first[1:], now)
        acks(good.number, first[:1], now, refused=revision.number, reason="no room")
        rollouts.sweep(now)
        assert states(revision.rollout).count("sent") == 1
        acks(good.number, [fleet.agents[3]], now, refused=revision.number, reason="no room")
        rollouts.sweep(now)
        # one refusal in each wave is allowed
        assert seen(revision)[0] == "done"

    def test_a_refusal_in_the_last_wave_rolls_back_too(self, fleet, good, actor, now):
        bad, first = begin(fleet, actor, now, Gates(hold_s=0, burn_most=None))
        rollouts.sweep(now)
        rest = [agent for agent in fleet.agents if agent not in first]
        acks(good.number, rest[:1], now, refused=bad.number, reason="no room")
        rollouts.sweep(now)
        assert seen(bad)[0] == "stopped"
        assert after(bad)[0].digest == good.digest


def test_named_agents_go_first_and_the_page_tells_gates_with_their_numbers(fleet, good, actor, now):
    chosen = fleet.agents[2]
    revision, first = begin(fleet, actor, now, waves=(WavePlan(agents=(chosen.name,)), 100))
    assert [agent.pk for agent in first] == [chosen.pk]
    page = rollout_page(revision.rollout, now)
    assert [wave.reaches for wave in page.waves] == [chosen.name, "Every agent"]
    readings = {row.gate: (row.state, row.observed) for row in page.waves[0].readings}
    assert readings["refusals"] == ("held", "0")
    assert readings["hold"] == ("waits", "0 s")
    assert page.waves[0].word == "Held"
    assert page.waves[1].readings == []


@pytest.mark.django_db(transaction=True)
def test_a_wave_is_not_broadcast_past_the_agents_it_is_for(actor, broker):
    """Every agent of a pool hears a broadcast and pulls what it names: it is sent once all of them may have it."""
    pool = make_fleet(4)
    other = make_fleet(1, slug="other-pool", model="other-model")
    now = timezone.now()
    uuids = [str(agent.uuid) for agent in pool.agents]
    with (
        Listeners(broker, "chat-70b", uuids) as heard,
        Listeners(broker, "other-pool", [str(other.agents[0].uuid)]) as elsewhere,
    ):
        revision = push(actor=actor, reason="x", now=now, waves=(25, 100), gates=Gates(hold_s=0, burn_most=None))
        rollouts.run(revision.rollout.pk, now)
        # the other pool has all of its agents in this wave
        wait_for(lambda: bool(elsewhere.nudges(str(other.agents[0].uuid))))
        assert [heard.nudges(uuid) for uuid in uuids] == [[], [], [], []]
        assert wanted(pool.agents) == {pool.agents[0].pk: revision.number}
        acks(revision.number, [pool.agents[0], other.agents[0]], now)
        rollouts.sweep(now)
        wait_for(lambda: all(heard.nudges(uuid) for uuid in uuids))
    assert {nudge.revision for uuid in uuids for nudge in heard.nudges(uuid)} == {revision.number}
