"""What earlier processes of this agent spooled: sent under their numbers, and their epochs sealed, oldest first."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from controlplane.agent import reporting
from controlplane.agent.backoff import backoff_s
from controlplane.agent.errors import Refused, Unreachable
from controlplane.agent.spool import EpochSpool

if TYPE_CHECKING:
    from controlplane.agent.control import Control

log = logging.getLogger(__name__)

IDLE_S = 1.0


class OldEpochs:
    """One agent's earlier epochs; `run` beside the reports of the present one."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def run(self) -> None:
        """Until cancelled. Raises what a refusal means for the whole process: Superseded or Retired."""
        failures = 0
        while True:
            spool = self._control.store.next_to_send()
            if spool is None:
                await asyncio.sleep(IDLE_S)
                continue
            try:
                sent = await self._send(spool)
            except OSError as error:
                self._control.lost_touch(f"reports cannot be written down: {error}")
                sent = False
            failures = 0 if sent else failures + 1
            if not sent:
                await asyncio.sleep(backoff_s(failures))

    async def _send(self, spool: EpochSpool) -> bool:
        """The oldest report of an epoch, the last cut where all are taken; True when the next may follow at once."""
        control, state = self._control, spool.state
        now_us = control.engine.clock.now_us()
        if not state.reports:
            if state.accepted and state.accepted[-1].seal:
                spool.seal(now_us)
                log.info("epoch %d is sealed at report %d", spool.epoch, state.last_seq)
                return True
            spends = control.engine.leases.spends_of_epoch(spool.epoch)
            if any(spend.reserved_nanos for spend in spends):  # by requests that this process goes on with
                await asyncio.sleep(IDLE_S)
                return True
            lost = len(state.opened)
            reporting.cut_last_report(spool, now_us, [*spends, *control.store.spent_after(spool.epoch)])
            if lost:
                log.warning(
                    "epoch %d: %d requests were in flight when its process ended: closed as lost", spool.epoch, lost
                )
        await asyncio.get_running_loop().run_in_executor(None, spool.sync)
        report = state.reports[0]
        try:
            answer = await control.client.report(spool.body_of(report), epoch=control.epoch_now(), seq=report.seq)
        except Unreachable:
            return False
        except Refused as refused:
            if refused.code == "superseded":
                log.error("epoch %d cannot be sent: %s", spool.epoch, refused)
                return False
            return control.refused(spool, report, refused)
        spool.accept(max(answer.accepted_through, report.seq), control.engine.clock.now_us())
        return True
