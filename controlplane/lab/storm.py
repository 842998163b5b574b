"""Clients that try again when they are refused."""

from __future__ import annotations

from functools import partial
from typing import Final

from controlplane.core.admission import AdmissionDecision
from controlplane.lab.calls import NOT_ENDED, Call
from controlplane.lab.service import ServiceModel
from controlplane.lab.simulator import START_US, Simulator
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument

TRIES: Final = 4
US_PER_S: Final = 1_000_000


class Storm(Simulator):
    """Clients that try again when they are refused, as soon as they are told to, three times.

    A request's wait counts from its first try.
    """

    def __init__(
        self, document: PolicyDocument, workload: Workload, service: ServiceModel, *, start_us: int = START_US
    ) -> None:
        self._tries: dict[int, int] = {}
        self._due = 0
        self.retried = 0
        super().__init__(document, workload, service, start_us=start_us)

    @property
    def all_arrived(self) -> bool:
        return not self._due and super().all_arrived

    def _refuse(self, call: Call, answer: AdmissionDecision, now_us: int) -> None:
        super()._refuse(call, answer, now_us)
        tries = self._tries[call.row] = self._tries.get(call.row, 1) + 1
        if tries <= TRIES and answer.retry_after_s is not None:
            self.retried += 1
            self._due += 1
            again_us = now_us + answer.retry_after_s * US_PER_S
            self.at(again_us, partial(self._again, call.row, again_us))

    def _again(self, row: int, now_us: int) -> None:
        self._due -= 1
        self.rows.ended_us[row] = -1
        self.rows.code[row] = NOT_ENDED
        self.rows.changed()
        self._arrive(row, now_us)
        self.rows.arrived_us[row] = self.start_us + self.workload.at_us[row]
