"""A pool of eight slots with rows as the exchange and the flex controller leave them."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from controlplane.contracts.models import WorkloadClass
from controlplane.fleet.models import Pool, Slot, SlotInterval, SlotTenure
from controlplane.ledger.models import CostRate
from controlplane.tenants.models import Tenant
from controlplane.usage.models import SlotMinute, SlotUsageMinute
from tests import factories

HOUR = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
MINUTE_US = 60_000_000
ONE_HOUR = timedelta(hours=1)
BANDS = {"i": "interactive", "b": "batch", "f": "flex"}


@dataclass
class Fleet:
    pool: Pool
    slots: dict[str, Slot]
    classes: dict[str, WorkloadClass]
    tenants: dict[str, Tenant] = field(default_factory=dict)

    def use(self, slot: str, tenant: str, class_: str, gpu_us: int, *, minute: datetime, charged: bool = True) -> None:
        SlotUsageMinute.objects.create(
            slot_id=self.slots[slot].pk, minute=minute, tenant_id=self.tenants[tenant].pk,
            class_id=self.classes[class_].pk, charged=charged, gpu_us=gpu_us,
        )  # fmt: skip

    def observe(self, start: datetime, end: datetime, slots: str | None = None) -> None:
        """Meters that saw every microsecond; busy is what the usage rows add up to."""
        minutes = int((end - start) / timedelta(minutes=1))
        watched = [slot.pk for name, slot in self.slots.items() if slots is None or name in slots.split()]
        busy: dict[tuple[int, datetime], int] = {}
        used = SlotUsageMinute.objects.filter(slot_id__in=watched)
        for slot_id, minute, gpu_us in used.values_list("slot_id", "minute", "gpu_us"):
            busy[slot_id, minute] = busy.get((slot_id, minute), 0) + gpu_us
        SlotMinute.objects.bulk_create(
            SlotMinute(slot_id=pk, minute=minute, busy_us=busy.get((pk, minute), 0), observed_us=MINUTE_US)
            for pk in watched
            for minute in (start + timedelta(minutes=number) for number in range(minutes))
        )

    def own(self, slot: str, pieces: list[tuple[datetime, datetime | None, str, str]]) -> None:
        """Replace a slot's intervals by (from, to, owner class, state)."""
        SlotInterval.objects.filter(slot=self.slots[slot]).delete()
        for start, end, owner, state in pieces:
            SlotInterval.objects.create(
                slot=self.slots[slot], started_at=start, ended_at=end, owner_class=owner, state=state
            )


def make_fleet(
    names: str = "i1 i2 i3 i4 b1 b2 f1 f2",
    *,
    tenants: str = "a b c",
    since: datetime = HOUR,
    rate_nanos: int | None = 2_500_000_000,
    slug: str = "chat-70b",
    **values: object,
) -> Fleet:
    factories.installation()
    classes = {
        slug_: WorkloadClass.objects.filter(slug=slug_).first() or factories.workload_class(slug_, kind)
        for slug_, kind in (("chat", "interactive"), ("bulk", "batch"))
    }
    pool = factories.pool(slug, **values)
    slots = {}
    for name in names.split():
        slots[name] = Slot.objects.create(pool=pool, name=name, band=BANDS[name[0]])
        SlotTenure.objects.create(slot=slots[name], started_at=since)
        owner = "" if pool.isolation == "shared" else "bulk" if name[0] == "b" else "chat"
        SlotInterval.objects.create(slot=slots[name], started_at=since, owner_class=owner, state="home")
    if rate_nanos is not None:
        add_rate(pool, rate_nanos, since)
    fleet = Fleet(pool, slots, classes)
    for slug_ in tenants.split():
        row = Tenant.objects.filter(slug=slug_).first() or factories.tenant(slug_, classes=["chat", "bulk"])
        fleet.tenants[slug_] = row
    return fleet


def add_rate(pool: Pool, nanos: int, since: datetime, *, created_at: datetime | None = None) -> CostRate:
    return CostRate.objects.create(
        pool=pool, nanos_per_slot_hour=nanos, effective_from=since, created_at=created_at or since, created_by="test"
    )


def worked_example(**values: object) -> Fleet:
    """Eight slots for one hour; F1 lent for the first 1,800 s, the last 30 s of them draining."""
    fleet = make_fleet(**values)
    half = HOUR + timedelta(minutes=30)
    drain = half - timedelta(seconds=30)
    fleet.own("f1", [(HOUR, drain, "bulk", "lent"), (drain, half, "bulk", "draining"), (half, None, "chat", "home")])
    # A 7,200 GPU-s and B 3,600 on the four floor slots, C 8,100 on the batch floor and, while lent, F1
    shares = [(f"i{n}", "a", "chat", 30) for n in range(1, 5)] + [(f"i{n}", "b", "chat", 15) for n in range(1, 5)]
    shares += [("b1", "c", "bulk", 55), ("b2", "c", "bulk", 55), ("f1", "c", "bulk", 50)]
    SlotUsageMinute.objects.bulk_create(
        SlotUsageMinute(
            slot_id=fleet.slots[slot].pk, minute=HOUR + timedelta(minutes=number), class_id=fleet.classes[class_].pk,
            tenant_id=fleet.tenants[tenant].pk, gpu_us=seconds * 1_000_000,
        )
        for number in range(60)
        for slot, tenant, class_, seconds in shares
        if slot != "f1" or number < 30
    )  # fmt: skip
    fleet.observe(HOUR, HOUR + ONE_HOUR)
    return fleet
