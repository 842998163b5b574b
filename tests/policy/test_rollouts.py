"""From push to acknowledgement, on real rows and real brokers."""

from datetime import timedelta

import msgspec
import pytest
from django.core.exceptions import ValidationError
from django.db import connection
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.policy import rollouts, tasks
from controlplane.policy.actions import push, refresh_bindings, rollback, send_next_wave
from controlplane.policy.configuration import Configuration
from controlplane.policy.ingest import note_revisions
from controlplane.policy.models import Delivery, PolicyBundle, Revision, Rollout, SigningKey, Wave
from controlplane.policy.nudges import compose, send
from controlplane.policy.queries import bundle, desired, desired_for, signing_keys
from controlplane.policy.signing import rotate
from controlplane.wire.policy import PolicyDocument, SignedPolicy, nudge_message, policy_message
from controlplane.wire.signing import digest_hex, from_text, verify
from tests import factories
from tests.policy.conftest import Listeners, make_fleet, read_nudge, wait_for
from tests.threads import at_once


def acks(revision: int, agents, now, *, refused: int | None = None, reason: str = "") -> None:
    with connection.cursor() as cursor:
        note_revisions(cursor, [(agent.pk, revision, refused, reason) for agent in agents], now)


def states(rollout: Rollout) -> list[str]:
    return list(rollout.deliveries.order_by("agent__name").values_list("state", flat=True))


def wanted(agents) -> dict[int, int]:
    with connection.cursor() as cursor:
        return {pk: revision for pk, (revision, _) in desired_for(cursor, [agent.pk for agent in agents]).items()}


@pytest.mark.django_db
class TestPush:
    def test_push_writes_intent_only(self, fleet, actor, now, no_broker):
        revision = push(actor=actor, reason="first", now=now)
        rollout = revision.rollout
        assert (rollout.state, states(rollout)) == ("requested", ["pending", "pending"])
        assert revision.bundles.get().signature is None
        assert desired([fleet.pool.pk]) == {}
        entry = AuditEntry.objects.get(action="policy.push")
        assert (entry.actor_name, entry.reason, entry.after["revision"]) == ("ada", "first", revision.number)

    def test_a_push_needs_a_reason_and_sound_waves(self, fleet, actor, now):
        for reason, waves in (("  ", (100,)), ("x", ()), ("x", (50,)), ("x", (50, 50, 100)), ("x", (0, 100))):
            with pytest.raises(ValidationError):
                push(actor=actor, reason=reason, now=now, waves=waves)
        assert not Revision.objects.exists()

    def test_a_push_that_breaks_a_rule_is_refused_with_what_to_do(self, fleet, actor, now):
        fleet.cards[0].delete()
        with pytest.raises(ValidationError) as caught:
            push(actor=actor, reason="x", now=now)
        assert "Add a rate card" in caught.value.message_dict["configuration"][0]

    def test_a_push_of_something_nobody_reviewed_is_refused(self, fleet, actor, now):
        with pytest.raises(ValidationError, match="Somebody saved a change"):
            push(actor=actor, reason="x", now=now, reviewed_digest="0" * 64)

    def test_the_worker_signs_for_installation_pool_revision_and_digest(self, fleet, actor, now, no_broker):
        revision = push(actor=actor, reason="x", now=now)
        rollouts.run(revision.rollout.pk, now)
        number, digest = desired([fleet.pool.pk])[fleet.pool.pk]
        signed = msgspec.json.decode(bundle(fleet.pool.pk, digest), type=SignedPolicy)
        body = from_text(signed.body)
        document = msgspec.json.decode(body, type=PolicyDocument)
        public = from_text(signing_keys()[f"policy:{signed.kid}"])
        message = {
            "installation": document.installation, "pool": "chat-70b", "revision": number, "digest": digest,
            "accept_until": document.accept_until,
        }  # fmt: skip
        assert digest_hex(body) == digest
        assert verify(public, from_text(signed.signature), policy_message(**message))
        for name, other in (
            ("pool", "b"),
            ("revision", 99),
            ("installation", "x"),
            ("accept_until", "2099-01-01T00:00:00Z"),
        ):
            assert not verify(public, from_text(signed.signature), policy_message(**{**message, name: other}))

    def test_a_bundle_is_answered_to_its_own_pool_only(self, fleet, actor, now, no_broker):
        other = factories.pool("other")
        factories.slot(other, "s0", "interactive")
        revision = push(actor=actor, reason="x", now=now)
        rollouts.run(revision.rollout.pk, now)
        digest = revision.bundles.get(pool=fleet.pool).digest
        assert bundle(fleet.pool.pk, digest)
        assert bundle(other.pk, digest) is None

    def test_acks_and_nacks_come_in_bulk_and_repeats_change_nothing(self, fleet, actor, now, no_broker):
        revision = push(actor=actor, reason="x", now=now)
        rollouts.run(revision.rollout.pk, now)
        first, second = fleet.agents
        rows = [(first.pk, revision.number, None, ""), (second.pk, 0, revision.number, "wrong target")]
        with connection.cursor() as cursor:
            assert note_revisions(cursor, rows, now) == (1, 1)
            assert note_revisions(cursor, rows, now) == (0, 0)
        assert states(revision.rollout) == ["acked", "nacked"]
        assert revision.rollout.deliveries.get(agent=second).reason == "wrong target"
        rollouts.sweep(now)
        revision.rollout.refresh_from_db()
        assert revision.rollout.state == "done"

    def test_silence_times_out_and_a_late_answer_still_counts(self, fleet, actor, now, no_broker):
        revision = push(actor=actor, reason="x", now=now)
        rollouts.run(revision.rollout.pk, now)
        acks(revision.number, fleet.agents[:1], now)
        rollouts.sweep(now + rollouts.TIMED_OUT_AFTER - timedelta(microseconds=1))
        assert states(revision.rollout) == ["acked", "sent"]
        rollouts.sweep(now + rollouts.TIMED_OUT_AFTER)
        assert states(revision.rollout) == ["acked", "timed_out"]
        acks(revision.number, fleet.agents, now)
        assert states(revision.rollout) == ["acked", "acked"]


@pytest.mark.django_db
class TestRollback:
    def test_a_rollback_is_a_higher_number_with_the_earlier_content(self, fleet, actor, now, no_broker):
        first = push(actor=actor, reason="x", now=now)
        fleet.tenant.weight = 9
        fleet.tenant.save(update_fields=["weight"])
        second = push(actor=actor, reason="y", now=now)
        back = rollback(to_number=first.number, actor=actor, reason="worse", now=now)
        assert back.number > second.number
        assert (back.rolls_back_from, back.rolls_back_to) == (second.number, first.number)
        assert back.digest == first.digest
        assert back.bundles.get().digest != first.bundles.get().digest
        second.rollout.refresh_from_db()
        assert second.rollout.state == "superseded"
        rollouts.run(back.rollout.pk, now)
        assert desired([fleet.pool.pk])[fleet.pool.pk][0] == back.number

    def test_rolling_back_needs_an_earlier_revision(self, fleet, actor, now, no_broker):
        only = push(actor=actor, reason="x", now=now)
        for number in (only.number, only.number + 50):
            with pytest.raises(ValidationError):
                rollback(to_number=number, actor=actor, reason="x", now=now)

    def test_a_rollback_keeps_slots_on_the_agents_that_run_them_now(self, fleet, actor, now, no_broker):
        first = push(actor=actor, reason="x", now=now)
        push(actor=actor, reason="y", now=now)
        newcomer = factories.agent(fleet.pool, "newcomer")
        fleet.pool.slots.filter(name="s0").update(agent=newcomer)
        back = rollback(to_number=first.number, actor=actor, reason="z", now=now)
        slots = Configuration.from_json(back.configuration).pools["chat-70b"].pool.slots
        assert slots[0].agent_id == newcomer.pk


@pytest.mark.django_db
class TestBindings:
    def test_an_agent_that_came_gets_its_slots_without_a_push_of_what_is_not_pushed(self, fleet, actor, now, no_broker):
        first = push(actor=actor, reason="x", now=now)
        rollouts.run(first.rollout.pk, now)
        fleet.tenant.weight = 9
        fleet.tenant.save(update_fields=["weight"])
        assert refresh_bindings(actor=Actor.system("binding"), now=now) is None
        newcomer = factories.agent(fleet.pool, "newcomer")
        fleet.pool.slots.filter(name="s0").update(agent=newcomer)
        bound = refresh_bindings(actor=Actor.system("binding"), now=now)
        document = Configuration.from_json(bound.configuration).pools["chat-70b"]
        assert document.pool.slots[0].agent_id == newcomer.pk
        assert document.tenants[0].weight == 1
        assert refresh_bindings(actor=Actor.system("binding"), now=now) is None or bound.rollout.state == "requested"


@pytest.mark.django_db
class TestWaves:
    def test_the_next_wave_waits_for_the_one_before(self, db, actor, now, no_broker):
        fleet = make_fleet(4)
        revision = push(actor=actor, reason="x", now=now, waves=(25, 100))
        rollout = revision.rollout
        rollouts.run(rollout.pk, now)
        assert states(rollout) == ["sent", "pending", "pending", "pending"]
        assert wanted(fleet.agents) == {fleet.agents[0].pk: revision.number}
        rollouts.sweep(now)
        assert states(rollout)[1] == "pending"
        acks(revision.number, fleet.agents[:1], now)
        rollouts.sweep(now)
        assert states(rollout) == ["acked", "sent", "sent", "sent"]
        acks(revision.number, fleet.agents, now)
        rollouts.sweep(now)
        rollout.refresh_from_db()
        assert rollout.state == "done"

    def test_a_refusal_stops_the_waves_to_come_and_rolls_back_once(self, db, actor, now, no_broker):
        fleet = make_fleet(4)
        good = push(actor=actor, reason="x", now=now)
        rollouts.run(good.rollout.pk, now)
        acks(good.number, fleet.agents, now)
        rollouts.sweep(now)
        fleet.tenant.weight = 9
        fleet.tenant.save(update_fields=["weight"])
        bad = push(actor=actor, reason="y", now=now, waves=(25, 100))
        rollouts.run(bad.rollout.pk, now)
        acks(good.number, fleet.agents[:1], now, refused=bad.number, reason="schema 9 is newer than this agent")
        rollouts.sweep(now)
        rollouts.sweep(now)
        bad.rollout.refresh_from_db()
        assert bad.rollout.state == "stopped"
        assert "schema 9" in bad.rollout.note
        back = Revision.objects.get(number__gt=bad.number)
        assert (back.rolls_back_to, back.digest) == (good.number, good.digest)
        assert bad.rollout.waves.get(number=2).state == "pending"

    def test_silence_holds_the_next_wave_until_a_person_lets_it_go(self, db, actor, now, no_broker):
        make_fleet(4)
        revision = push(actor=actor, reason="x", now=now, waves=(25, 100))
        rollouts.run(revision.rollout.pk, now)
        late = now + rollouts.TIMED_OUT_AFTER
        rollouts.sweep(late)
        rollouts.sweep(late)
        revision.rollout.refresh_from_db()
        assert revision.rollout.state == "running"
        assert "silent" in revision.rollout.note
        send_next_wave(rollout_id=revision.rollout.pk, actor=actor, reason="known outage", now=late)
        assert states(revision.rollout) == ["timed_out", "sent", "sent", "sent"]
        with pytest.raises(ValidationError):
            send_next_wave(rollout_id=revision.rollout.pk, actor=actor, reason="again", now=late)


@pytest.mark.django_db(transaction=True)
class TestBroker:
    def test_one_broadcast_reaches_every_agent_of_the_pool(self, broker, actor):
        fleet = make_fleet(3)
        uuids = [str(agent.uuid) for agent in fleet.agents]
        with Listeners(broker, "chat-70b", uuids) as listeners:
            revision = push(actor=actor, reason="x", now=timezone.now())
            assert tasks.push(rollout_id=revision.rollout.pk)
            wait_for(lambda: all(listeners.heard[uuid] for uuid in uuids))
        signed, nudge = read_nudge(listeners.heard[uuids[0]][0])
        assert [len(heard) for heard in listeners.heard.values()] == [1, 1, 1]
        assert (nudge.kind, nudge.pool, nudge.agent, nudge.revision, nudge.wave) == (
            "policy",
            "chat-70b",
            None,
            revision.number,
            1,
        )
        assert nudge.digest == revision.bundles.get().digest
        body = from_text(signed.body)
        message = nudge_message(installation=str(factories.installation().uuid), digest=digest_hex(body))
        assert verify(from_text(signing_keys()[f"nudge:{signed.kid}"]), from_text(signed.signature), message)

    def test_what_concerns_one_agent_reaches_it_alone(self, broker, actor):
        fleet = make_fleet(2)
        uuids = [str(agent.uuid) for agent in fleet.agents]
        now = timezone.now()
        with Listeners(broker, "chat-70b", uuids) as listeners:
            assert send(compose("recall", pool="chat-70b", agent=uuids[1], slot_id=7, fence=3, now=now), now=now)
            wait_for(lambda: bool(listeners.heard[uuids[1]]))
        assert listeners.heard[uuids[0]] == []
        assert [(nudge.kind, nudge.slot_id, nudge.fence) for nudge in listeners.nudges(uuids[1])] == [("recall", 7, 3)]

    def test_a_doubled_task_broadcasts_once_and_a_lost_one_is_swept(self, broker, actor):
        fleet = make_fleet(1)
        uuid = str(fleet.agents[0].uuid)
        with Listeners(broker, "chat-70b", [uuid]) as listeners:
            # The doorbell of the push is lost: nobody runs the task. The sweep finds the row.
            revision = push(actor=actor, reason="x", now=timezone.now())
            tasks.sweep()
            wait_for(lambda: bool(listeners.heard[uuid]))
            tasks.push(rollout_id=revision.rollout.pk)
            tasks.push(rollout_id=revision.rollout.pk)
            tasks.sweep()
            send(compose("report", pool="chat-70b", agent=uuid, now=timezone.now()))
            wait_for(lambda: len(listeners.heard[uuid]) >= 2)
        assert [nudge.kind for nudge in listeners.nudges(uuid)] == ["policy", "report"]

    def test_a_broadcast_that_nobody_answered_is_sent_again(self, broker, actor):
        fleet = make_fleet(1)
        uuid = str(fleet.agents[0].uuid)
        now = timezone.now()
        with Listeners(broker, "chat-70b", [uuid]) as listeners:
            revision = push(actor=actor, reason="x", now=now)
            rollouts.run(revision.rollout.pk, now)
            rollouts.sweep(now + rollouts.NUDGE_AGAIN_AFTER)
            wait_for(lambda: len(listeners.heard[uuid]) == 2)
        first, second = listeners.nudges(uuid)
        assert (first.revision, first.digest) == (second.revision, second.digest)
        assert first.nonce != second.nonce

    def test_with_the_broker_down_the_push_stands_and_the_sweep_sends_it_later(self, broker, actor, no_broker):
        # `no_broker` was set last: nothing listens there. The rows are complete all the same.
        fleet = make_fleet(1)
        now = timezone.now()
        revision = push(actor=actor, reason="x", now=now)
        rollouts.sweep(now)
        wave = Wave.objects.get(rollout__revision=revision)
        assert (wave.state, wave.nudged_at) == ("sent", None)
        assert wanted(fleet.agents) == {fleet.agents[0].pk: revision.number}


@pytest.mark.django_db(transaction=True)
def test_the_sweep_sends_what_a_broker_that_was_down_did_not_take(actor, broker):
    fleet = make_fleet(1)
    now = timezone.now()
    revision = push(actor=actor, reason="x", now=now)
    fence = rollouts.take_fence(revision.rollout.pk)
    assert rollouts.advance(fence, now)  # the worker died before it broadcast
    uuid = str(fleet.agents[0].uuid)
    with Listeners(broker, "chat-70b", [uuid]) as listeners:
        rollouts.sweep(now)
        wait_for(lambda: bool(listeners.heard[uuid]))
    assert Wave.objects.get(rollout__revision=revision).nudged_at is not None


@pytest.mark.django_db(transaction=True)
class TestTwoAtOnce:
    def test_who_lost_the_fence_writes_nothing(self, actor, no_broker):
        make_fleet(2)
        now = timezone.now()
        revision = push(actor=actor, reason="x", now=now)
        slow = rollouts.take_fence(revision.rollout.pk)
        fast = rollouts.take_fence(revision.rollout.pk)
        assert rollouts.advance(slow, now) is None
        assert PolicyBundle.objects.filter(signature__isnull=False).count() == 0
        assert states(revision.rollout) == ["pending", "pending"]
        assert rollouts.advance(fast, now)
        assert states(revision.rollout) == ["sent", "sent"]
        Wave.objects.update(nudged_at=None)
        rollouts.broadcast(slow, [], now)
        assert Wave.objects.get(rollout__revision=revision).nudged_at is None

    def test_workers_in_threads_sign_once_and_open_once(self, actor, no_broker):
        make_fleet(2)
        now = timezone.now()
        revision = push(actor=actor, reason="x", now=now)
        at_once([lambda: rollouts.run(revision.rollout.pk, now)] * 8, within_s=60)
        row = revision.bundles.get()
        assert SigningKey.objects.filter(use="policy").count() == 1
        assert row.kid == SigningKey.objects.get(use="policy").kid
        assert states(revision.rollout) == ["sent", "sent"]

    def test_pushes_at_once_get_growing_numbers_and_one_stays_open(self, actor, no_broker):
        make_fleet(2)
        at_once([lambda: push(actor=actor, reason="x", now=timezone.now())] * 6, within_s=60)
        revisions = list(Revision.objects.order_by("number"))
        assert len(revisions) == 6
        assert Rollout.objects.exclude(state="superseded").get().revision == revisions[-1]
        assert Delivery.objects.filter(state="pending").count() == 2

    def test_sweeps_at_once_roll_back_once(self, actor, no_broker):
        fleet = make_fleet(4)
        now = timezone.now()
        good = push(actor=actor, reason="x", now=now)
        rollouts.run(good.rollout.pk, now)
        acks(good.number, fleet.agents, now)
        rollouts.sweep(now)
        bad = push(actor=actor, reason="y", now=now, waves=(25, 100))
        rollouts.run(bad.rollout.pk, now)
        acks(0, fleet.agents[:1], now, refused=bad.number, reason="no")
        at_once([lambda: rollouts.sweep(now)] * 4, within_s=60)
        assert Revision.objects.filter(number__gt=bad.number).count() == 1


@pytest.mark.django_db
def test_a_revoked_key_is_replaced_under_the_same_digest(fleet, actor, now, no_broker):
    revision = push(actor=actor, reason="x", now=now)
    rollouts.run(revision.rollout.pk, now)
    before = revision.bundles.get()
    successor = rotate("policy", now)
    rollouts.sweep(now)
    after = revision.bundles.get()
    assert after.digest == before.digest
    assert (before.kid != successor, after.kid) == (True, successor)
    assert f"policy:{before.kid}" not in signing_keys()


@pytest.mark.django_db
def test_private_keys_are_files_of_their_owner_and_uses_have_their_own(fleet, actor, now, signing_keys, no_broker):
    revision = push(actor=actor, reason="x", now=now)
    rollouts.run(revision.rollout.pk, now)
    files = sorted(signing_keys.iterdir())
    assert {file.name.split("-")[0] for file in files} == {"live", "nudge", "policy"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert signing_keys.stat().st_mode & 0o777 == 0o700
    assert len({bytes(row.public_key) for row in SigningKey.objects.all()}) == 3
