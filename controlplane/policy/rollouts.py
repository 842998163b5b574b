"""How the worker moves a rollout: sign once, open a wave, broadcast once, watch the answers, stop at a refusal.

Whoever works on a rollout takes its fence first and writes only while it still holds it: of two workers at once the
first one loses the fence and writes nothing. Broadcasts come after the commit, and a repeated one changes nothing.
"""

import uuid
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from controlplane.audit.actors import Actor
from controlplane.core.wave_gates import GateState
from controlplane.policy.actions import OPEN_ROLLOUTS, open_wave, roll_back_stopped, stop
from controlplane.policy.configuration import instant
from controlplane.policy.models import Delivery, PolicyBundle, Revision, Rollout, SigningKey, Wave
from controlplane.policy.nudges import compose, send_all
from controlplane.policy.queries import latest_revision
from controlplane.policy.signing import signer
from controlplane.policy.wave_facts import verdict_of
from controlplane.tenants.queries import installation
from controlplane.wire.policy import Nudge, policy_message

REPORT_INTERVAL = timedelta(seconds=2)
# A broadcast that reached nobody for this many report intervals is sent again.
NUDGE_AGAIN_AFTER = 5 * REPORT_INTERVAL
# An agent that has not answered for this many report intervals is counted as timed out; a late answer still counts.
TIMED_OUT_AFTER = 30 * REPORT_INTERVAL
ROLLOUT_ACTOR = Actor.system("rollout")


@dataclass(frozen=True)
class Fence:
    rollout_id: int
    token: uuid.UUID


def take_fence(rollout_id: int) -> Fence | None:
    """The right to write this rollout, taken from whoever had it; None when it is over or just being taken."""
    with transaction.atomic():
        rollout = (
            Rollout.objects.select_for_update(skip_locked=True).filter(pk=rollout_id, state__in=OPEN_ROLLOUTS).first()
        )
        if rollout is None:
            return None
        token = uuid.uuid4()
        Rollout.objects.filter(pk=rollout_id).update(fence=token)
    return Fence(rollout_id, token)


def advance(fence: Fence, now: datetime) -> list[Nudge] | None:
    """Signs, opens the first wave when none is open, returns the broadcasts to send; None when the fence is lost."""
    with transaction.atomic():
        rollout = _held(fence)
        if rollout is None:
            return None
        sign_bundles(rollout.revision, now)
        waves = list(rollout.waves.order_by("number"))
        if waves and waves[0].state == Wave.State.PENDING:
            open_wave(waves[0], now)
        Rollout.objects.filter(pk=rollout.pk).update(state=Rollout.State.RUNNING)
    return broadcasts(fence.rollout_id, now)


def sign_bundles(revision: Revision, now: datetime) -> int:
    """Signs what is not signed yet; one signature per pool, however many agents it has."""
    rows = list(PolicyBundle.objects.select_for_update().filter(revision=revision, signature__isnull=True))
    if not rows:
        return 0
    key = signer(SigningKey.Use.POLICY, now)
    installation_id = str(installation().uuid)
    for row in PolicyBundle.objects.filter(pk__in=[row.pk for row in rows]).select_related("pool"):
        message = policy_message(
            installation=installation_id,
            pool=row.pool.slug,
            revision=revision.number,
            digest=row.digest,
            accept_until=instant(revision.accept_until),
        )
        PolicyBundle.objects.filter(pk=row.pk).update(kid=key.kid, signature=key.sign(message), signed_at=now)
    return len(rows)


def broadcasts(rollout_id: int, now: datetime) -> list[Nudge]:
    """One nudge per pool that has agents in an open wave nobody was told of yet, once all of the pool may have it.

    A broadcast is heard by every agent of a pool, and each pulls what it names: before the pool's last wave it would
    carry the revision past the gates. Until then the answer to an agent's next report names it to those it is for.
    """
    untold = list(
        Wave.objects.filter(rollout_id=rollout_id, state=Wave.State.SENT, nudged_at__isnull=True).order_by("number")
    )
    if not untold:
        return []
    revision = untold[0].rollout.revision_id
    pools = Delivery.objects.filter(rollout_id=rollout_id).values_list("agent__pool_id", flat=True).distinct()
    pending = Wave.objects.filter(rollout_id=rollout_id, state=Wave.State.PENDING).values("number")
    reached = set(pools.filter(wave__in=[wave.number for wave in untold])) - set(pools.filter(wave__in=pending))
    rows = PolicyBundle.objects.filter(revision_id=revision, pool_id__in=reached, signature__isnull=False)
    return [
        compose("policy", pool=row.pool.slug, revision=revision, digest=row.digest, wave=untold[-1].number, now=now)
        for row in rows.select_related("pool").order_by("pool__slug")
    ]


def broadcast(fence: Fence, nudges: list[Nudge], now: datetime) -> bool:
    """Sends and notes it; False when the broker is out of reach: the sweep sends again, reports converge meanwhile."""
    if not send_all(nudges, now=now):
        return False
    Wave.objects.filter(
        rollout_id=fence.rollout_id, rollout__fence=fence.token, state=Wave.State.SENT, nudged_at__isnull=True
    ).update(nudged_at=now)
    return True


def run(rollout_id: int, now: datetime) -> bool:
    """One piece of work on a rollout, from the fence to the broadcast; False when somebody else has it."""
    fence = take_fence(rollout_id)
    if fence is None:
        return False
    nudges = advance(fence, now)
    if nudges is None:
        return False
    broadcast(fence, nudges, now)
    return True


def sweep(now: datetime) -> None:
    """Everything that time or a lost message left undone. Two sweeps at once do the work once."""
    sign_again(now)
    for rollout_id in list(Rollout.objects.filter(state__in=OPEN_ROLLOUTS).values_list("pk", flat=True)):
        _time_out(rollout_id, now)
        _judge(rollout_id, now)
        _forget_nudge(rollout_id, now)
        run(rollout_id, now)
    # After the gates, in a transaction of its own: a push locks in the other order.
    roll_back_stopped(actor=ROLLOUT_ACTOR, now=now)


def sign_again(now: datetime) -> None:
    """Signs the newest bundles whose key was revoked with its successor: same bytes, same digest."""
    revoked = list(
        SigningKey.objects.filter(use=SigningKey.Use.POLICY, revoked_at__isnull=False).values_list("kid", flat=True)
    )
    newest = latest_revision()
    if not revoked or newest is None:
        return
    with transaction.atomic():
        rows = PolicyBundle.objects.filter(revision=newest, kid__in=revoked)
        if rows.update(signature=None, kid="", signed_at=None):
            sign_bundles(newest, now)


def _held(fence: Fence) -> Rollout | None:
    """The rollout's row, locked, when the fence still holds and the rollout is still open."""
    return (
        Rollout.objects.select_for_update(of=("self",))
        .select_related("revision")
        .defer("revision__configuration")
        .filter(pk=fence.rollout_id, fence=fence.token, state__in=OPEN_ROLLOUTS)
        .first()
    )


def _time_out(rollout_id: int, now: datetime) -> None:
    Delivery.objects.filter(
        rollout_id=rollout_id, state=Delivery.State.SENT, sent_at__lte=now - TIMED_OUT_AFTER
    ).update(state=Delivery.State.TIMED_OUT, reason="no answer", answered_at=now)


def _forget_nudge(rollout_id: int, now: datetime) -> None:
    """Lets a wave be broadcast again when agents of it owe an answer since the last one."""
    owing = Delivery.objects.filter(rollout_id=rollout_id, state=Delivery.State.SENT).values("wave")
    Wave.objects.filter(
        Q(nudged_at__lte=now - NUDGE_AGAIN_AFTER), rollout_id=rollout_id, state=Wave.State.SENT, number__in=owing
    ).update(nudged_at=None)


def _judge(rollout_id: int, now: datetime) -> None:
    """The gates of the latest open wave: one that fails stops and rolls back, all that hold send the next or end it.

    What is not known waits, and after its time is left to a person: nothing unknown passes by itself.
    """
    with transaction.atomic():
        rollout = (
            Rollout.objects.select_for_update(skip_locked=True, of=("self",))
            .select_related("revision")
            .defer("revision__configuration")
            .filter(pk=rollout_id, state=Rollout.State.RUNNING)
            .first()
        )
        if rollout is None:
            return
        waves = list(rollout.waves.order_by("number"))
        sent = [wave for wave in waves if wave.state == Wave.State.SENT]
        to_come = [wave for wave in waves if wave.state == Wave.State.PENDING]
        if not sent:
            return
        if rollout.gated:
            _judge_gated(rollout, sent, to_come, now)
        elif not Delivery.objects.filter(rollout=rollout, state=Delivery.State.SENT).exists():
            _finish(rollout, "", now)


def _judge_gated(rollout: Rollout, sent: list[Wave], to_come: list[Wave], now: datetime) -> None:
    """Waves that passed are asked again as long as the rollout goes on: an agent may refuse or fall silent later."""
    verdict = None
    for wave in sent:
        verdict = verdict_of(rollout, wave, now)
        Wave.objects.filter(pk=wave.pk).update(readings=[asdict(reading) for reading in verdict.readings])
        if verdict.state is GateState.FAILED:
            stop(rollout, note=f"wave {wave.number}: {verdict.why}", now=now)
            return
    assert verdict is not None, "a wave was sent"
    last = sent[-1]
    if verdict.state is GateState.HELD:
        Wave.objects.filter(pk=last.pk).update(passed_at=now)
        if to_come:
            _say(rollout, "")
            open_wave(to_come[0], now)
        else:
            _finish(rollout, "", now)
    elif verdict.state is GateState.ASKS and to_come:
        _say(rollout, f"wave {to_come[0].number} waits for a person: {verdict.why}")
    elif verdict.state is GateState.ASKS:
        _finish(rollout, f"every wave is out, but not everything is known: {verdict.why}", now)
    else:
        _say(rollout, "")


def _say(rollout: Rollout, note: str) -> None:
    Rollout.objects.filter(pk=rollout.pk).exclude(note=note).update(note=note)


def _finish(rollout: Rollout, note: str, now: datetime) -> None:
    Rollout.objects.filter(pk=rollout.pk).update(state=Rollout.State.DONE, note=note, finished_at=now)
