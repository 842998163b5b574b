"""Doorbells of policy: they carry row ids and re-read intent from rows; a lost or doubled one changes nothing."""

from celery import shared_task
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.fleet.models import Pool
from controlplane.policy import live_list, rollouts
from controlplane.policy.actions import refresh_bindings
from controlplane.policy.nudges import compose, send_all
from controlplane.policy.signing import ensure_keys

BINDING_ACTOR = Actor.system("binding")


@shared_task(name="policy.push", ignore_result=True)
def push(rollout_id: int) -> bool:
    """One wave of a rollout: signs once, opens the wave, publishes one broadcast per pool."""
    return rollouts.run(rollout_id, timezone.now())


@shared_task(name="policy.sign_live", ignore_result=True)
def sign_live() -> int:
    """Signs changes that act at once and tells every pool: what stops something goes along, the rest is asked for."""
    now = timezone.now()
    before = live_list.newest()
    signed = live_list.sign_changes(now)
    if signed:
        urgent = live_list.urgent(before) or None
        pools = Pool.objects.filter(archived_at__isnull=True).order_by("slug").values_list("slug", flat=True)
        send_all([compose("live", pool=slug, now=now, live=urgent) for slug in pools], now=now)
    return signed


@shared_task(name="policy.sweep", ignore_result=True)
def sweep() -> None:
    """What lost messages and silence left undone: live entries, bindings, waves, answers that never came."""
    now = timezone.now()
    # Agents learn public keys when they say hello, so keys exist before there is anything to sign.
    ensure_keys(now)
    sign_live()
    live_list.sign_again(now)
    refresh_bindings(actor=BINDING_ACTOR, now=now)
    rollouts.sweep(now)
