"""How the worker moves a rollout: sign once, open a wave, broadcast once, watch the answers, stop at a refusal.

Whoever works on a rollout takes its fence first and writes only while it still holds it: of two workers at once the
first one loses the fence and writes nothing. Broadcasts come after the commit, and a repeated one changes nothing.
"""

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from controlplane.audit.actors import Actor
from controlplane.policy.actions import OPEN_ROLLOUTS, open_wave, roll_back_stopped, stop
from controlplane.policy.configuration import instant
from controlplane.policy.models import Delivery, PolicyBundle, Revision, Rollout, SigningKey, Wave
from controlplane.policy.nudges import compose, send_all
from controlplane.policy.signing import signer
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
    """One nudge per pool that has agents in an open wave nobody was told of yet."""
    untold = list(
        Wave.objects.filter(rollout_id=rollout_id, state=Wave.State.SENT, nudged_at__isnull=True).order_by("number")
    )
    if not untold:
        return []
    revision = untold[0].rollout.revision_id
    reached = set(
        Delivery.objects.filter(rollout_id=rollout_id, wave__in=[wave.number for wave in untold]).values_list(
            "agent__pool_id", flat=True
        )
    )
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
    newest = Revision.objects.order_by("-number").first()
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
    """The gate: a refusal stops waves that are still to come and rolls back; all answered sends the next or ends it.

    Silence never passes by itself: with waves to come, an agent that timed out holds them until a person decides.
    """
    with transaction.atomic():
        rollout = (
            Rollout.objects.select_for_update(skip_locked=True, of=("self",))
            .filter(pk=rollout_id, state=Rollout.State.RUNNING)
            .first()
        )
        if rollout is None:
            return
        waves = list(rollout.waves.order_by("number"))
        to_come = [wave for wave in waves if wave.state == Wave.State.PENDING]
        states = list(
            Delivery.objects.filter(
                rollout=rollout, wave__in=[w.number for w in waves if w not in to_come]
            ).values_list("state", flat=True)
        )
        if Delivery.State.SENT in states and Delivery.State.NACKED not in states:
            return
        if to_come and Delivery.State.NACKED in states:
            _stop(rollout, now)
        elif to_come and Delivery.State.TIMED_OUT in states:
            note = f"wave {to_come[0].number} waits: agents of the wave before are silent"
            Rollout.objects.filter(pk=rollout.pk).update(note=note)
        elif to_come:
            Rollout.objects.filter(pk=rollout.pk).update(note="")
            open_wave(to_come[0], now)
        elif Delivery.State.SENT not in states:
            Rollout.objects.filter(pk=rollout.pk).update(state=Rollout.State.DONE, finished_at=now)


def _stop(rollout: Rollout, now: datetime) -> None:
    refusals = Delivery.objects.filter(rollout=rollout, state=Delivery.State.NACKED).select_related("agent")
    first = refusals.order_by("agent__name").first()
    why = f"{first.agent.name} refused it: {first.reason}" if first is not None else "an agent refused it"
    stop(rollout, note=why, now=now)
