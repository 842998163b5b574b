"""What a person decides about usage that was set aside."""

from datetime import datetime

from django.core.exceptions import ValidationError
from django.db import transaction

from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.usage.models import Quarantine

WHY_CHARS_MAX = 400


def decide_set_aside(
    *, reason: str, agent_id: int | None, through_id: int, why: str, actor: Actor, now: datetime
) -> int:
    """Marks the open entries of one reason and agent, up to the one that was seen, as decided; returns how many.

    Totals do not change. Raises ValidationError without a decision in words.
    """
    why = why.strip()
    if not why or len(why) > WHY_CHARS_MAX:
        raise ValidationError(f"Say what was decided, in at most {WHY_CHARS_MAX} characters.")
    with transaction.atomic():
        open_entries = Quarantine.objects.filter(
            reason=reason, agent_id=agent_id, id__lte=through_id, resolved_at__isnull=True
        )
        decided = open_entries.update(resolved_at=now)
        if decided:
            record(
                actor=actor,
                action="usage.decide",
                noun="quarantine",
                object_id=through_id,
                after={"reason": reason, "agent_id": agent_id, "entries": decided},
                reason=why,
                now=now,
            )
    return decided
