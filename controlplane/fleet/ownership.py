"""Tenure and ownership of slots: intervals that tile a tenure without gap or overlap. Call inside a transaction."""

from datetime import datetime

from controlplane.fleet.models import Pool, Slot, SlotInterval, SlotTenure

HOME = "home"


def home_class(pool: Pool, band: str) -> str:
    """The class that owns a slot of a band while it is home; empty in a shared pool, where nobody does."""
    if pool.isolation == Pool.Isolation.SHARED:
        return ""
    return pool.batch_class if band == Slot.Band.BATCH else pool.interactive_class


def open_interval(slot: Slot) -> SlotInterval | None:
    """The slot's present interval, locked."""
    return SlotInterval.objects.select_for_update().filter(slot=slot, ended_at__isnull=True).first()


def begin_tenure(slot: Slot, pool: Pool, *, now: datetime, reason: str) -> None:
    """The slot joins the fleet: cost runs from now, at home with the class of its band."""
    SlotTenure.objects.get_or_create(slot=slot, ended_at=None, defaults={"started_at": now})
    SlotInterval.objects.get_or_create(
        slot=slot,
        ended_at=None,
        defaults={
            "state": HOME,
            "owner_class": home_class(pool, slot.band),
            "started_at": now,
            "fence": last_fence(slot),
            "reason": reason,
        },
    )


def end_tenure(slot: Slot, *, now: datetime) -> None:
    """The slot leaves the fleet: cost ends now. An interval or tenure without length is taken back."""
    SlotInterval.objects.filter(slot=slot, ended_at__isnull=True, started_at__gte=now).delete()
    SlotInterval.objects.filter(slot=slot, ended_at__isnull=True).update(ended_at=now)
    SlotTenure.objects.filter(slot=slot, ended_at__isnull=True, started_at__gte=now).delete()
    SlotTenure.objects.filter(slot=slot, ended_at__isnull=True).update(ended_at=now)


def change_owner(slot: Slot, owner_class: str, *, now: datetime, reason: str) -> None:
    """From now on the slot, which is home, belongs to another class: one interval ends where the next begins."""
    present = open_interval(slot)
    if present is None or present.state != HOME or present.owner_class == owner_class:
        return
    if present.started_at >= now:
        SlotInterval.objects.filter(pk=present.pk).update(owner_class=owner_class, reason=reason)
        return
    SlotInterval.objects.filter(pk=present.pk).update(ended_at=now)
    SlotInterval.objects.create(
        slot=slot, state=HOME, owner_class=owner_class, fence=present.fence, started_at=now, reason=reason
    )


def last_fence(slot: Slot) -> int:
    """The highest fence that the slot ever had: fences only grow, across tenures too."""
    return SlotInterval.objects.filter(slot=slot).order_by("-fence").values_list("fence", flat=True).first() or 0
