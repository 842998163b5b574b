"""GPU time by slot, minute, tenant and class; what a failed or preempted attempt used is told apart.

Whether an attempt's time is charged is known when its first output is handed out, or at its end. Until then its time is
held back, minute by minute, so that every minute's shares add up to the slot's busy time exactly and nothing that was
told is ever taken back.
"""

from __future__ import annotations

from controlplane.core.slot_meter import US_PER_MINUTE, Name, SlotMeter
from controlplane.wire.report import SlotMeter as MeterRow
from controlplane.wire.report import SlotUsage


class AttemptTime:
    """An attempt on a slot; `charged` None is not known yet, `held_us` by minute what waits for that."""

    __slots__ = ("charged", "class_id", "ended", "held_us", "tenant_id")

    def __init__(self, tenant_id: int, class_id: int) -> None:
        self.tenant_id = tenant_id
        self.class_id = class_id
        self.charged: bool | None = None
        self.ended = False
        self.held_us: dict[int, int] | None = None

    def hold(self, minute_us: int, us: int) -> None:
        """Keep time back until it is known who pays."""
        if self.held_us is None:
            self.held_us = {}
        self.held_us[minute_us] = self.held_us.get(minute_us, 0) + us


class MeteredSlot:
    """One slot's meter and what was seen of the slot."""

    def __init__(self, slot_id: int, now_us: int) -> None:
        self.slot_id = slot_id
        self.meter = SlotMeter()
        self._observed_to_us = now_us
        self._usage: list[SlotUsage] = []
        self._rows: list[MeterRow] = []
        self._attempts: dict[Name, AttemptTime] = {}
        self._latest_us = now_us

    def _forward(self, now_us: int) -> int:
        """The meter's instants never go back; two readings of one turn of the loop may come in either order."""
        if now_us > self._latest_us:
            self._latest_us = now_us
        return self._latest_us

    def start(self, serial: int, tenant_id: int, class_id: int, now_us: int) -> None:
        """An attempt begins; serials never repeat."""
        if now_us > self._latest_us:
            self._latest_us = now_us
        self._attempts[serial] = AttemptTime(tenant_id, class_id)
        self.meter.start(serial, self._latest_us, serial)

    def delivered(self, serial: int) -> None:
        """Output of the attempt was handed to its client: its time is charged, however it ends."""
        self._attempts[serial].charged = True

    def end(self, serial: int, now_us: int, *, charged: bool) -> int:
        """The attempt stopped; returns its gpu_us, 0 for one that waited for its batch and never ran."""
        attempt = self._attempts.get(serial)
        if attempt is None:
            return 0
        attempt.ended = True
        if attempt.charged is None:
            attempt.charged = charged
        if now_us > self._latest_us:
            self._latest_us = now_us
        return self.meter.end(serial, self._latest_us)

    @property
    def holds_back(self) -> bool:
        """Whether something of this slot is still to be told."""
        return bool(self._attempts)

    def collect(self, now_us: int, *, warming: bool, broken: bool) -> tuple[list[SlotUsage], list[MeterRow]]:
        """What was added since the last call; observed time runs from call to call."""
        self.gather(now_us, warming=warming, broken=broken)
        return self.take()

    def take(self) -> tuple[list[SlotUsage], list[MeterRow]]:
        """What was gathered since the last call."""
        usage, self._usage = self._usage, []
        rows, self._rows = self._rows, []
        return usage, rows

    def gather(self, now_us: int, *, warming: bool, broken: bool) -> None:
        """Add up what was used since the last call, for the next `take`. O(requests that ran)."""
        now_us = self._forward(now_us)
        minutes = self.meter.collect(now_us)
        used: dict[tuple[int, int, int, bool], int] = {}
        for (minute_us, key, _), us in minutes.gpu_us_by_key.items():
            attempt = self._attempts[key]
            if attempt.charged is None:
                attempt.hold(minute_us, us)
                continue
            place = minute_us, attempt.tenant_id, attempt.class_id, attempt.charged
            used[place] = used.get(place, 0) + us
        for attempt in self._attempts.values():
            if attempt.charged is None or attempt.held_us is None:
                continue
            for minute_us, us in attempt.held_us.items():
                place = minute_us, attempt.tenant_id, attempt.class_id, attempt.charged
                used[place] = used.get(place, 0) + us
            attempt.held_us = None
        self._attempts = {key: attempt for key, attempt in self._attempts.items() if not attempt.ended}
        self._usage += [SlotUsage(self.slot_id, *place, us) for place, us in used.items() if us]
        self._rows += self._observed(dict(minutes.busy_us_by_minute), now_us, warming=warming, broken=broken)

    def _observed(self, busy: dict[int, int], now_us: int, *, warming: bool, broken: bool) -> list[MeterRow]:
        rows, at_us = [], self._observed_to_us
        while at_us < now_us:
            minute_us = at_us - at_us % US_PER_MINUTE
            until_us = min(now_us, minute_us + US_PER_MINUTE)
            seen = until_us - at_us
            idle = (seen if warming else 0, seen if broken else 0)
            rows.append(MeterRow(self.slot_id, minute_us, busy.pop(minute_us, 0), seen, *idle))
            at_us = until_us
        rows += [MeterRow(self.slot_id, minute_us, us, 0) for minute_us, us in busy.items()]
        self._observed_to_us = max(now_us, self._observed_to_us)
        return rows
