"""Whether this agent takes requests, why not, and how long one would wait: what a balancer asks."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Final

from controlplane.core.admission import estimate_wait_us

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine


class NotReady(StrEnum):
    """Why /readyz is 503, the first that holds."""

    DRAINING = "draining"
    NO_EPOCH = "no_epoch"
    NO_POLICY = "no_policy"
    NO_KEYS = "no_keys"
    DISK = "disk"
    NO_SLOT = "no_slot"


SENTENCES: Final = {
    NotReady.DRAINING: "This server is shutting down. Retry: another one will take the request.",
    NotReady.NO_EPOCH: "This server has not received its policy yet. Retry shortly.",
    NotReady.NO_POLICY: "This server has not received its policy yet. Retry shortly.",
    NotReady.NO_KEYS: "This server has not received the list of API keys yet. Retry shortly.",
    NotReady.DISK: "This server cannot write its records. Retry: another one will take the request.",
}
"""What a client is told. Without a ready slot requests are queued or refused as their class says."""


def closed(engine: Engine) -> NotReady | None:
    """Why no request is taken at all, or None."""
    if engine.draining:
        return NotReady.DRAINING
    if engine.spool is None:
        return NotReady.NO_EPOCH
    if engine.registry.document is None:
        return NotReady.NO_POLICY
    if not engine.registry.knows_keys:
        return NotReady.NO_KEYS
    return NotReady.DISK if engine.disk_problem else None


def not_ready(engine: Engine) -> NotReady | None:
    """Why a balancer is to send requests elsewhere, or None."""
    return closed(engine) or (None if engine.ready else NotReady.NO_SLOT)


def expected_wait_us(engine: Engine, class_slug: str, now_us: int) -> int | None:
    """What a small request of a class would wait, as admission reckons it; None when no slot serves the class."""
    queue = next((queue for queue in engine.scheduler.classes if queue.spec.slug == class_slug), None)
    if queue is None or not queue.serving_slots:
        return None
    ahead_us = sum(other.queued_gpu_us for other in queue.ahead)
    free = any(len(slot.running) < slot.places for slot in queue.slots)
    first_end_us = min((slot.first_end_us for slot in queue.slots), default=now_us)
    first_free_us = 0 if free else max(0, first_end_us - now_us)
    return estimate_wait_us(ahead_us, first_free_us, queue.serving_slots)
