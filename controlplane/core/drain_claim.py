"""Did every loan come home in time? The claim over a set of loans, and by name those that it leaves out.

A loan is home in time when no more than the drain bound and the time for cancelling passed between the agent's last
instant of admitting and its being home, both by the agent's own clock. What a time to live adds before that instant is
the agent's boot clock's and is not measured here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoanEnd:
    """How one loan ended. ``drain_us`` is ``None`` while it runs and where the agent could not measure it.

    Raises ``ValueError`` for a negative drain or a bound that is not above 0.
    """

    name: str
    bound_us: int
    drain_us: int | None = None
    home: bool = False
    overdue: bool = False

    def __post_init__(self) -> None:
        if self.bound_us <= 0:
            raise ValueError(f"{self.name}: the bound of a drain must be above 0")
        if self.drain_us is not None and self.drain_us < 0:
            raise ValueError(f"{self.name}: a drain takes 0 or more")


@dataclass(frozen=True, kw_only=True)
class DrainClaim:
    """``within`` of ``measured`` loans were home in time; ``late`` were not and have no excuse.

    ``overdue`` broke their estimate and were told of when it happened; ``unmeasured`` are home, and nobody knows how
    fast. Both are left out of the claim by name. Loans that run or drain are in none.
    """

    measured: int
    within: int
    worst_us: int | None
    late: tuple[str, ...] = ()
    overdue: tuple[str, ...] = ()
    unmeasured: tuple[str, ...] = ()


def drain_claim(loans: Iterable[LoanEnd]) -> DrainClaim:
    """Judge loans; names keep their order."""
    measured: list[LoanEnd] = []
    overdue, unmeasured = [], []
    for loan in loans:
        if loan.overdue:
            overdue.append(loan.name)
        elif loan.home and loan.drain_us is None:
            unmeasured.append(loan.name)
        elif loan.home:
            measured.append(loan)
    late = [loan.name for loan in measured if loan.drain_us is not None and loan.drain_us > loan.bound_us]
    return DrainClaim(
        measured=len(measured),
        within=len(measured) - len(late),
        worst_us=max((loan.drain_us for loan in measured if loan.drain_us is not None), default=None),
        late=tuple(late),
        overdue=tuple(overdue),
        unmeasured=tuple(unmeasured),
    )
