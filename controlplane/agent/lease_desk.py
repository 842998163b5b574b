"""Asking for leases between reports: one question per tenant at a time, and never a storm of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from controlplane.agent.client import ControlPlane
from controlplane.agent.engine import Engine
from controlplane.agent.errors import Refused, Unreachable
from controlplane.agent.waiting import wait_at_most
from controlplane.wire.lease import LeaseRequest
from controlplane.wire.report import LeaseSpend

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.1
"""Between two questions for one tenant that nobody waits for."""
WAITED_PAUSE_S: Final = 0.02
"""The same while requests wait: each has 250 ms, and an answer may cover some of them only."""
GATHER_S: Final = 0.005
"""Before a question: what arrives together is asked for together."""
AWAY_PAUSE_S: Final = 1.0
"""The same while the control plane does not answer."""


_Question = tuple[int, str]
"""A tenant and the job that its requests belong to, empty for none."""


class LeaseDesk:
    """Coalesces questions; every one ends in `FrontDesk.lease_answered`."""

    def __init__(self, client: ControlPlane, engine: Engine, epoch: Callable[[], int]) -> None:
        self._client = client
        self._engine = engine
        self._epoch = epoch
        self._needs: dict[_Question, int] = {}
        self._not_before_s: dict[_Question, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._back = asyncio.Event()
        """Ends the pauses of all questions, for a moment, when the control plane answers again."""
        engine.desk.ask_lease = self.ask
        engine.leases.on_return = self._returned

    def ask(self, tenant_id: int, need_nanos: int, job: str = "") -> None:
        """Ask soon; a question that is under way covers this one when it needs no more."""
        question = tenant_id, job
        asking = question in self._needs
        self._needs[question] = max(need_nanos, self._needs.get(question, 0))
        if not asking:
            task = asyncio.create_task(self._ask(question))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _returned(self) -> None:
        self._not_before_s.clear()
        self._back.set()
        self._back.clear()

    def _spends(self, tenant_id: int) -> list[LeaseSpend]:
        """What was spent of a tenant's leases, once the journal says so too: nothing is told that a kill could undo."""
        spool = self._engine.spool
        if spool is None:
            return []
        try:
            spool.flush()
        except OSError:
            return []
        return self._engine.leases.spends(tenant_id)

    async def _ask(self, question: _Question) -> None:
        loop, engine = asyncio.get_running_loop(), self._engine
        tenant_id, job = question
        pause_s = max(GATHER_S, self._not_before_s.get(question, 0.0) - loop.time())
        if pause_s > GATHER_S:
            await wait_at_most(self._back, pause_s)
        else:
            await asyncio.sleep(GATHER_S)
        asked_us = engine.clock.now_us()
        waiting_nanos = engine.desk.waiting_nanos(tenant_id)
        spends = self._spends(tenant_id)
        request = LeaseRequest(tenant_id, self._needs[question], spends, waiting_nanos, job)
        pause_s = PAUSE_S
        try:
            answer = await self._client.lease(request, epoch=self._epoch())
            engine.leases.apply(answer.leases, answer.exhausted, asked_us=asked_us, now_us=engine.clock.now_us())
            if job and answer.exhausted:
                engine.leases.nothing_for(tenant_id, job, engine.clock.now_us())
        except Unreachable:
            engine.leases.unanswered.add(tenant_id)
            pause_s = AWAY_PAUSE_S
        except Refused as refused:
            if refused.status >= 500:
                # Somebody is there and cannot say what is left of a budget: no better than nobody.
                engine.leases.unanswered.add(tenant_id)
            else:
                log.warning("no lease for tenant %d: %s", tenant_id, refused)
            pause_s = AWAY_PAUSE_S
        finally:
            del self._needs[question]
            self._not_before_s[question] = loop.time() + pause_s
        engine.desk.lease_answered(tenant_id)
        if pause_s == PAUSE_S and engine.desk.waiting_nanos(tenant_id):
            self._not_before_s[question] = loop.time() + WAITED_PAUSE_S
