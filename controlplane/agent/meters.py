"""GPU time by slot, minute, tenant and class; what a failed or preempted attempt used is told apart afterwards.

The meter's keys carry the attempt's serial, so that time already reported as charged can be moved to `repeated work`
in the minutes in which it was used, and the sum over both stays the busy time exactly.
"""

from __future__ import annotations

from controlplane.core.slot_meter import US_PER_MINUTE, SlotMeter
from controlplane.wire.report import SlotMeter as MeterRow
from controlplane.wire.report import SlotUsage


class AttemptTime:
    """An attempt on a slot while its time may still move."""

    __slots__ = ("class_id", "reported", "tenant_id")

    def __init__(self, tenant_id: int, class_id: int) -> None:
        self.tenant_id = tenant_id
        self.class_id = class_id
        self.reported: dict[int, int] = {}


class MeteredSlot:
    """One slot's meter and what was seen of the slot."""

    def __init__(self, slot_id: int, now_us: int) -> None:
        self.slot_id = slot_id
        self.meter = SlotMeter()
        self._observed_to_us = now_us
        self._attempts: dict[str, AttemptTime] = {}
        self._ended: dict[str, bool] = {}

    def start(self, serial: int, tenant_id: int, class_id: int, now_us: int) -> None:
        key = str(serial)
        self._attempts[key] = AttemptTime(tenant_id, class_id)
        self.meter.start(key, now_us, tenant=key)

    def end(self, serial: int, now_us: int, *, charged: bool) -> int:
        """The attempt stopped; returns its gpu_us."""
        key = str(serial)
        self._ended[key] = charged
        return self.meter.end(key, now_us)

    def collect(self, now_us: int, *, warming: bool, broken: bool) -> tuple[list[SlotUsage], list[MeterRow]]:
        """What was added since the last call; observed time runs from call to call."""
        minutes = self.meter.collect(now_us)
        used: dict[tuple[int, int, int, bool], int] = {}
        for (minute_us, serial, _), us in minutes.gpu_us_by_key.items():
            attempt = self._attempts[serial]
            charged = self._ended.get(serial, True)
            key = minute_us, attempt.tenant_id, attempt.class_id, charged
            used[key] = used.get(key, 0) + us
            if charged:
                attempt.reported[minute_us] = attempt.reported.get(minute_us, 0) + us
        for serial, charged in self._ended.items():
            attempt = self._attempts.pop(serial)
            if not charged:
                for minute_us, us in attempt.reported.items():
                    for sign, side in ((-us, True), (us, False)):
                        key = minute_us, attempt.tenant_id, attempt.class_id, side
                        used[key] = used.get(key, 0) + sign
        self._ended.clear()
        usage = [SlotUsage(self.slot_id, *key, us) for key, us in used.items() if us]
        return usage, self._observed(minutes.busy_us_by_minute, now_us, warming=warming, broken=broken)

    def _observed(self, busy: dict[int, int], now_us: int, *, warming: bool, broken: bool) -> list[MeterRow]:
        rows, at_us = [], self._observed_to_us
        while at_us < now_us:
            minute_us = at_us - at_us % US_PER_MINUTE
            until_us = min(now_us, minute_us + US_PER_MINUTE)
            seen = until_us - at_us
            rows.append(
                MeterRow(
                    self.slot_id, minute_us, busy.pop(minute_us, 0), seen, seen if warming else 0, seen if broken else 0
                )
            )
            at_us = until_us
        rows += [MeterRow(self.slot_id, minute_us, us, 0) for minute_us, us in busy.items()]
        self._observed_to_us = max(now_us, self._observed_to_us)
        return rows
