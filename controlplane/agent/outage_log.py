"""What happened to requests with a hard budget while the control plane was away: counted, logged, told to operators."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

SAY_EVERY_US: Final = 60_000_000


@dataclass(slots=True)
class Away:
    """One tenant's requests in outages since the start of this process."""

    admitted: int = 0
    refused: int = 0
    said_us: int = -SAY_EVERY_US


class OutageLog:
    """Counts by tenant; each tenant is logged at its first request in an outage and then once a minute."""

    def __init__(self) -> None:
        self.tenants: dict[int, Away] = {}

    def admitted(self, tenant_id: int, slug: str, now_us: int) -> None:
        """A request was admitted from the outage slice."""
        away = self._of(tenant_id)
        away.admitted += 1
        self._say(away, slug, now_us)

    def refused(self, tenant_id: int, slug: str, now_us: int) -> None:
        """A request was refused: neither the control plane nor a lease nor enough of a slice was there."""
        away = self._of(tenant_id)
        away.refused += 1
        self._say(away, slug, now_us)

    @property
    def totals(self) -> dict[str, int]:
        """Decision -> requests."""
        return {
            "admitted": sum(away.admitted for away in self.tenants.values()),
            "refused": sum(away.refused for away in self.tenants.values()),
        }

    def _of(self, tenant_id: int) -> Away:
        return self.tenants.setdefault(tenant_id, Away())

    def _say(self, away: Away, slug: str, now_us: int) -> None:
        if now_us - away.said_us < SAY_EVERY_US:
            return
        away.said_us = now_us
        log.warning(
            "tenant %s: neither the control plane nor a lease is there; since the start %d requests were admitted from "
            "its outage slice and %d refused with no_lease",
            slug,
            away.admitted,
            away.refused,
        )
