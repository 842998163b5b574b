"""What changes revisions and rollouts: push, roll back, ship new bindings, send the next wave.

An action writes rows and rings; the worker signs and broadcasts. A message that is lost costs latency only.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timedelta

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import connection, transaction

from controlplane.audit.actions import none_recorded, note_carried, record
from controlplane.audit.actors import Actor
from controlplane.contracts.queries import rest_of_ttft_ms
from controlplane.fleet.models import Agent, Pool, Slot
from controlplane.policy.compile import Source, compile_source, load_source
from controlplane.policy.configuration import Configuration, Stamp
from controlplane.policy.diff import diff, summary
from controlplane.policy.models import Delivery, PolicyBundle, Revision, Rollout, Wave
from controlplane.policy.queries import configuration_of, latest_revision, revision_before
from controlplane.policy.validation import Facts, errors, validate
from controlplane.policy.wave_plan import REFUSALS_ONLY, Gates, Placeable, WavePlan, place, plans
from controlplane.wakeups.bells import ring
from controlplane.wire.signing import TIME_TOLERANCE_US, digest_hex

ALL_AT_ONCE = (100,)
REASON_MOST = 2_000
# Any fixed number: pushes take turns, so that revisions become visible in the order of their numbers.
PUSH_LOCK = 0x666C7075

# An agent whose clock is behind by no more than a signed request may be must not refuse what is new.
CLOCK_TOLERANCE = timedelta(microseconds=TIME_TOLERANCE_US)

OPEN_ROLLOUTS = (Rollout.State.REQUESTED, Rollout.State.RUNNING)
OPEN_DELIVERIES = (Delivery.State.PENDING, Delivery.State.SENT)


def push(
    *,
    actor: Actor,
    reason: str,
    now: datetime,
    waves: Sequence[int | WavePlan] = ALL_AT_ONCE,
    gates: Gates | None = None,
    reviewed_digest: str | None = None,
) -> Revision:
    """Compiles what is saved and requests its rollout.

    Several waves are always gated, by `REFUSALS_ONLY` unless `gates` says otherwise; all at once only with `gates`.
    `reviewed_digest` is the digest that the person saw: when somebody saved something since, the push is refused.
    Raises ValidationError with every rule that does not hold and what to do about it.
    """
    _check_reason(reason)
    plan = plans(waves)
    gates = _checked_gates(gates, plan)
    with transaction.atomic():
        _take_turn()
        source, through = _source_and_log(now)
        found = errors(validate(source, Facts(now=now, rest_of_ttft_ms=rest_of_ttft_ms(now))))
        if found:
            raise ValidationError(
                {"configuration": [f"{item.subject}: {item.message} {item.action}" for item in found]}
            )
        configuration = compile_source(source)
        if reviewed_digest is not None and reviewed_digest != configuration.digest:
            raise ValidationError(
                {"configuration": "Somebody saved a change since you opened this review. Look at it again, then push."}
            )
        revision = _publish(configuration, actor=actor, reason=reason, now=now, waves=plan, gates=gates)
        note_carried(revision=revision.number, through_id=through)
        previous = revision_before(revision.number)
        before = configuration_of(previous.number) if previous else None
        record(
            actor=actor,
            action="policy.push",
            noun="revision",
            object_id=revision.number,
            now=now,
            before={"revision": previous.number if previous else None},
            after={
                "revision": revision.number,
                "digest": revision.digest,
                "waves": [wave.text for wave in plan],
                "gates": asdict(gates) if gates else None,
                "changes": summary(diff(before, configuration, now=now)),
            },
            reason=reason,
        )
    return revision


def rollback(
    *,
    to_number: int,
    actor: Actor,
    reason: str,
    now: datetime,
    waves: Sequence[int | WavePlan] = ALL_AT_ONCE,
    gates: Gates | None = None,
) -> Revision:
    """A new revision with the content of an earlier one, slots bound to the agents that run them now.

    Numbers only grow, so an agent takes it like any other. Raises ValidationError for a revision that cannot be
    rolled back to.
    """
    _check_reason(reason)
    plan = plans(waves)
    gates = _checked_gates(gates, plan)
    with transaction.atomic():
        _take_turn()
        return _roll_back(to_number=to_number, actor=actor, reason=reason, now=now, waves=plan, gates=gates)


def roll_back_stopped(*, actor: Actor, now: datetime) -> Revision | None:
    """Pushes the content of the last revision that was not stopped, when the latest one was stopped by its gate."""
    with transaction.atomic():
        _take_turn()
        current = latest_revision()
        stopped = Rollout.objects.filter(revision=current, state=Rollout.State.STOPPED).first() if current else None
        if stopped is None:
            return None
        earlier = Rollout.objects.filter(revision_id__lt=stopped.revision_id).exclude(state=Rollout.State.STOPPED)
        good = earlier.order_by("-revision_id").first()
        if good is None:
            return None
        reason = f"Revision {stopped.revision_id} was stopped: {stopped.note}"
        return _roll_back(to_number=good.revision_id, actor=actor, reason=reason, now=now, waves=plans(ALL_AT_ONCE))


def _roll_back(
    *,
    to_number: int,
    actor: Actor,
    reason: str,
    now: datetime,
    waves: Sequence[WavePlan],
    gates: Gates | None = None,
) -> Revision:
    target = Revision.objects.filter(number=to_number).first()
    current = latest_revision()
    if target is None or current is None:
        raise ValidationError({"revision": f"There is no revision {to_number}. Choose one from the list."})
    if target.number >= current.number:
        raise ValidationError(
            {"revision": f"Revision {to_number} is the latest one. Choose an earlier one to roll back to."}
        )
    revision = _publish(
        Configuration.from_json(target.configuration).with_bindings(_bindings()),
        actor=actor,
        reason=reason,
        now=now,
        waves=waves,
        gates=gates,
        rolls_back_from=current.number,
        rolls_back_to=target.number,
    )
    record(
        actor=actor,
        action="policy.rollback",
        noun="revision",
        object_id=revision.number,
        now=now,
        before={"revision": current.number, "digest": current.digest},
        after={"revision": revision.number, "digest": revision.digest, "content_of": target.number},
        reason=reason,
    )
    return revision


def refresh_bindings(*, actor: Actor, now: datetime) -> Revision | None:
    """Ships where slots run now when agents came or went: the last policy unchanged, with the present bindings.

    Waits while a rollout is under way or stopped: whether its content stays is not settled then.
    """
    with transaction.atomic():
        _take_turn()
        current = _settled_revision()
        if current is None:
            return None
        present = Configuration.from_json(current.configuration)
        bound = present.with_bindings(_bindings())
        if bound.digest == present.digest:
            return None
        reason = "Slots run on other agents than in revision " + str(current.number)
        revision = _publish(bound, actor=actor, reason=reason, now=now, waves=plans(ALL_AT_ONCE))
        record(
            actor=actor,
            action="policy.bind",
            noun="revision",
            object_id=revision.number,
            now=now,
            before={"revision": current.number},
            after={
                "revision": revision.number,
                "digest": revision.digest,
                "changes": summary(diff(present, bound, now=now)),
            },
            reason=reason,
        )
    return revision


def _settled_revision() -> Revision | None:
    """The latest revision, unless its rollout is under way or stopped: whether its content stays is open then."""
    current = latest_revision()
    rollout = Rollout.objects.filter(revision=current).first() if current is not None else None
    if rollout is None or rollout.state == Rollout.State.STOPPED or _waves_pending(rollout):
        return None
    return current


def repeat_latest(*, actor: Actor, reason: str, now: datetime) -> Revision | None:
    """Ships the last policy unchanged under a new number, to agents that may have a later one from a database that is
    lost. None where there is none, or where its rollout is under way or stopped: that is for a person to decide.
    """
    with transaction.atomic():
        _take_turn()
        current = _settled_revision()
        if current is None:
            return None
        content = Configuration.from_json(current.configuration)
        revision = _publish(content, actor=actor, reason=reason, now=now, waves=plans(ALL_AT_ONCE))
        record(
            actor=actor,
            action="policy.repeat",
            noun="revision",
            object_id=revision.number,
            now=now,
            before={"revision": current.number},
            after={"revision": revision.number, "digest": revision.digest, "content_of": current.number},
            reason=reason,
        )
    return revision


def send_next_wave(*, rollout_id: int, actor: Actor, reason: str, now: datetime) -> Rollout:
    """Lets the next wave go although a gate does not hold yet. Raises ValidationError when none waits."""
    _check_reason(reason)
    with transaction.atomic():
        _take_turn()
        rollout = Rollout.objects.select_for_update().filter(pk=rollout_id).first()
        wave = rollout.waves.filter(state=Wave.State.PENDING).order_by("number").first() if rollout else None
        if rollout is None or wave is None or rollout.state not in OPEN_ROLLOUTS:
            raise ValidationError({"rollout": "No wave of this rollout is waiting. Reload the page to see its state."})
        open_wave(wave, now)
        record(
            actor=actor,
            action="policy.next_wave",
            noun="revision",
            object_id=rollout.revision_id,
            now=now,
            after={"wave": wave.number, "reaches": plan_of(wave).text},
            reason=reason,
        )
        ring("policy.push", rollout_id=rollout.pk)
    return rollout


def open_wave(wave: Wave, now: datetime) -> None:
    """From here on agents of the wave are told to apply the revision, by the next report at the latest."""
    Wave.objects.filter(pk=wave.pk, state=Wave.State.PENDING).update(state=Wave.State.SENT, sent_at=now)
    Delivery.objects.filter(rollout_id=wave.rollout_id, wave=wave.number, state=Delivery.State.PENDING).update(
        state=Delivery.State.SENT, sent_at=now
    )


def stop(rollout: Rollout, *, note: str, now: datetime) -> None:
    """Ends a rollout whose gate failed; the caller holds its row."""
    Rollout.objects.filter(pk=rollout.pk).update(state=Rollout.State.STOPPED, note=note, finished_at=now)


def _source_and_log(now: datetime) -> tuple[Source, int]:
    """The rows, and the last entry of the audit log whose change is in them: none up to it is missing, none after it
    is in, for nobody adds to the log meanwhile.
    """
    with none_recorded() as through:
        return load_source(now), through


# Columns go as arrays: ten thousand rows of values take three times as long to write and to read.
_DELIVERIES = """
INSERT INTO policy_delivery (rollout_id, agent_id, wave, digest, state, reason)
SELECT %(rollout)s, agent_id, wave, digest, 'pending', ''
  FROM unnest(%(agents)s::int[], %(waves)s::smallint[], %(digests)s::text[]) AS given (agent_id, wave, digest)
"""


def plan_of(wave: Wave) -> WavePlan:
    return WavePlan(wave.percent, tuple(wave.pools), tuple(wave.agents))


def _checked_gates(gates: Gates | None, plan: Sequence[WavePlan]) -> Gates | None:
    if gates is None and len(plan) > 1:
        return REFUSALS_ONLY
    if gates is not None:
        gates.check()
    return gates


def _publish(
    configuration: Configuration,
    *,
    actor: Actor,
    reason: str,
    now: datetime,
    waves: Sequence[WavePlan],
    gates: Gates | None = None,
    rolls_back_from: int | None = None,
    rolls_back_to: int | None = None,
) -> Revision:
    stamp = Stamp(_next_number(), now - CLOCK_TOLERANCE, now + timedelta(seconds=settings.POLICY_ACCEPT_S))
    revision = Revision.objects.create(
        number=stamp.revision,
        created_at=now,
        created_by=actor.name,
        reason=reason,
        digest=configuration.digest,
        configuration=configuration.to_json(),
        rolls_back_from=rolls_back_from,
        rolls_back_to=rolls_back_to,
        not_before=stamp.not_before,
        accept_until=stamp.accept_until,
    )
    _supersede(revision, now)
    digests = _bundles(revision, configuration, stamp)
    rollout = Rollout.objects.create(
        revision=revision,
        requested_at=now,
        requested_by=actor.name,
        gated=gates is not None,
        **(asdict(gates) if gates else {}),
    )
    Wave.objects.bulk_create(
        Wave(rollout=rollout, number=number, percent=wave.percent, pools=wave.pools, agents=wave.agents)
        for number, wave in enumerate(waves, 1)
    )
    agents = list(
        Agent.objects.filter(state=Agent.State.ACTIVE, pool_id__in=digests)
        .order_by("pool_id", "name")
        .values_list("id", "pool_id", "pool__slug", "name")
    )
    placed = place([Placeable(pk, slug, name) for pk, _, slug, name in agents], waves)
    with connection.cursor() as cursor:
        cursor.execute(
            _DELIVERIES,
            {
                "rollout": rollout.pk,
                "agents": [pk for pk, *_ in agents],
                "waves": [placed[pk] for pk, *_ in agents],
                "digests": [digests[pool_id] for _, pool_id, *_ in agents],
            },
        )
    ring("policy.push", rollout_id=rollout.pk)
    return revision


def _bundles(revision: Revision, configuration: Configuration, stamp: Stamp) -> dict[int, str]:
    """Writes what each pool's agents pull, not yet signed: pool id -> digest. A pool that was archived gets none."""
    bodies = configuration.stamped(stamp)
    ids = dict(Pool.objects.filter(slug__in=bodies, archived_at__isnull=True).values_list("slug", "id"))
    bundles = [
        PolicyBundle(revision=revision, pool_id=ids[slug], digest=digest_hex(body), body=body)
        for slug, body in bodies.items()
        if slug in ids
    ]
    PolicyBundle.objects.bulk_create(bundles)
    return {bundle.pool_id: bundle.digest for bundle in bundles}


def _supersede(revision: Revision, now: datetime) -> None:
    """The newest revision is what agents are to have; the ways of earlier ones end here."""
    note = f"superseded by revision {revision.number}"
    ids = list(Rollout.objects.select_for_update().filter(state__in=OPEN_ROLLOUTS).values_list("pk", flat=True))
    Rollout.objects.filter(pk__in=ids).update(state=Rollout.State.SUPERSEDED, note=note, finished_at=now)
    Delivery.objects.filter(rollout_id__in=ids, state__in=OPEN_DELIVERIES).update(
        state=Delivery.State.TIMED_OUT, reason=note, answered_at=now
    )


def _waves_pending(rollout: Rollout) -> bool:
    return rollout.waves.filter(state=Wave.State.PENDING).exists()


def _bindings() -> dict[int, int | None]:
    return dict(Slot.objects.values_list("id", "agent_id"))


def _take_turn() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [PUSH_LOCK])


def _next_number() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT nextval(pg_get_serial_sequence('policy_revision', 'number'))")
        return int(cursor.fetchone()[0])


def _check_reason(reason: str) -> None:
    if not reason.strip():
        raise ValidationError({"reason": "Enter a reason for this change."})
    if len(reason) > REASON_MOST:
        raise ValidationError({"reason": f"Shorten the reason to {REASON_MOST} characters."})
