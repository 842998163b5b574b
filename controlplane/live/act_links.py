"""What on-call can press about a pool's band now: links to the pages that show an act's effect first."""

from __future__ import annotations

from typing import Any, Final

from controlplane.core.slot_states import SlotState
from controlplane.fleet.models import Pool
from controlplane.live.attention import link
from controlplane.live.readings import Reading

RECALLS_SHOWN: Final = 3


def act_links(reading: Reading, pool: Pool, *, frozen: bool) -> list[dict[str, Any]]:
    """Recalls of lent slots, longest lent first, and the freeze, or its end; none for a pool without a flex slot."""
    slots = [slot for slot in reading.slots.get(pool.pk, []) if slot.band == "flex"]
    if not slots:
        return []
    lent = [slot for slot in slots if slot.state == SlotState.LENT]
    lent.sort(key=lambda slot: (slot.since is None, slot.since, slot.name))
    acts = [_act(f"Recall {slot.name}", link("flex-recall", slot.slot_id)) for slot in lent[:RECALLS_SHOWN]]
    acts.append(
        _act("Unfreeze lending", link("flex-unfreeze", pool.slug))
        if frozen
        else _act("Freeze lending", link("flex-freeze", pool.slug))
    )
    return acts


def _act(text: str, url: str) -> dict[str, Any]:
    return {"key": url, "text": text, "url": url}
