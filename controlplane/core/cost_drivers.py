"""What moved a sum from one month to the next: volume, mix, price and idle, which add up to the difference exactly.

Per group (a model and class of a tenant, a pool): q is its quantity, p its average price. With Q the total quantity and
P the average price of the month before: volume = (Q1 - Q0) x P0, mix = sum of (q1 - q0 x Q1 / Q0) x p0, price = sum of
q1 x (p1 - p0). A group that is new has no price before: its own price now counts, so that it is mix and volume alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from controlplane.core.money import distribute


@dataclass(frozen=True, slots=True)
class Measured:
    """Quantity (any unit that is the same in both months) and nanos of one group in one month."""

    quantity: int
    nanos: int


@dataclass(frozen=True, slots=True)
class Drivers:
    """Nanos by driver; their sum is the difference of the two months to the nano."""

    volume_nanos: int
    mix_nanos: int
    price_nanos: int
    idle_nanos: int

    @property
    def total_nanos(self) -> int:
        return self.volume_nanos + self.mix_nanos + self.price_nanos + self.idle_nanos


NOTHING = Measured(0, 0)


def compare(
    before: Mapping[str, Measured], after: Mapping[str, Measured], *, idle_before: int = 0, idle_after: int = 0
) -> Drivers:
    """Drivers from `before` to `after` by group; idle has no quantity and is a driver of its own."""
    total = sum(one.nanos for one in after.values()) - sum(one.nanos for one in before.values())
    quantity_0, quantity_1 = (sum(one.quantity for one in part.values()) for part in (before, after))
    volume = Fraction(0)
    if quantity_0:
        volume = Fraction((quantity_1 - quantity_0) * sum(one.nanos for one in before.values()), quantity_0)
    price = Fraction(0)
    for group in before.keys() | after.keys():
        was, now = before.get(group, NOTHING), after.get(group, NOTHING)
        if was.quantity:
            price += now.nanos - Fraction(now.quantity * was.nanos, was.quantity)
        elif not now.quantity:
            # money without a quantity on either side moves by price alone
            price += now.nanos - was.nanos
    if not quantity_0:
        volume = total - price
    parts = distribute(total, {"volume": volume, "price": price, "mix": total - volume - price})
    return Drivers(parts["volume"], parts["mix"], parts["price"], idle_after - idle_before)
