"""The control plane is frozen or killed while batch runs on lent slots: every slot is home in time by itself.

Real processes: web, controller and two agents on PostgreSQL; all of them started here.
"""

import asyncio
import signal
import time

import pytest

from controlplane.flex.models import Grant, Lend, Trip
from tests.agent import control_planes as cp
from tests.chaos.cut_off_world import DRAIN_BOUND_S, HOME_WITHIN_S, TTL_S, ControlPlane, Fleet, lent_fleet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.processes, pytest.mark.slow]

CUTS = (
    ("controller frozen", signal.SIGSTOP, ("controller",)),
    ("controller killed", signal.SIGKILL, ("controller",)),
    ("web frozen", signal.SIGSTOP, ("web",)),
    ("web and controller frozen", signal.SIGSTOP, ("web", "controller")),
    ("web and controller killed", signal.SIGKILL, ("web", "controller")),
)
#: Between two looks at every agent; a state is never known better than this.
LOOK_S = 0.3


async def way_home(fleet: Fleet, fences: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Slot -> seconds until it admitted no more batch and until it was home, watched from now on.

    They are when the last look began that still found it otherwise: how long a look takes is the machine's.
    """
    began, before, stopped, home = time.monotonic(), 0.0, {}, {}
    while len(home) < len(fences):
        asked = time.monotonic() - began
        seen = await fleet.flex()
        assert asked < HOME_WITHIN_S + 10, f"not home after {asked:.1f} s: {seen}"
        for name, slot in seen.items():
            assert slot["fence"] == fences[name], "nobody could give it another fence"
            if slot["flex"] != "lent":
                stopped.setdefault(name, before)
            if slot["flex"] == "home":
                home.setdefault(name, before)
            assert name not in home or slot["flex"] == "home", "what is home stays there while nobody lends"
            assert name not in home or slot["running"] == 0, "batch on a slot that is home"
        before = asked
        await asyncio.sleep(0.05)
    return {name: (stopped[name], home[name]) for name in fences}


async def test_with_the_control_plane_cut_off_every_lent_slot_is_home_in_time(world, tmp_path, capsys):
    plane = ControlPlane(tmp_path)
    lines = []
    fleet = None
    try:
        fleet = await lent_fleet(world, plane, tmp_path)
        for name, number, victims in CUTS:
            await cp.until(fleet.all_lent_and_busy, 120)
            fences = {slot: seen["fence"] for slot, seen in (await fleet.flex()).items()}
            await plane.cut(number, *victims)
            for slot, (stop_s, home_s) in sorted((await way_home(fleet, fences)).items()):
                lines.append(
                    f"  {name:26} {slot}: stopped admitting after {stop_s:5.2f} s (promise {TTL_S}), "
                    f"home after {home_s:5.2f} s (promise {HOME_WITHIN_S}; without cancelling {TTL_S + DRAIN_BOUND_S})"
                )
                assert stop_s <= TTL_S + LOOK_S, lines[-1]
                assert home_s <= HOME_WITHIN_S + LOOK_S, lines[-1]
            await plane.mend(number, *victims)
            await cp.until(lambda fences=fences: lent_again(fleet, fences), 60)
    finally:
        with capsys.disabled():
            print("\n" + "\n".join(lines))
        if fleet is not None:
            await fleet.end()
        await plane.end()
    loans = await cp.in_database(lambda: list(Lend.objects.exclude(recalled_at=None).select_related("slot")))()
    with capsys.disabled():
        for loan in loans:
            took = "not measured" if loan.drain_us is None else f"{loan.drain_us / 1e6:.2f} s"
            print(f"  ledger: {loan.slot.name} fence {loan.fence}: {loan.recall_reason}, way home {took}")
    assert len(loans) >= len(CUTS) * 2
    assert all(loan.drain_us is None or loan.drain_us <= (DRAIN_BOUND_S + 1) * 1_000_000 for loan in loans)
    assert not any(loan.overdue for loan in loans)


async def lent_again(fleet: Fleet, before: dict[str, int]) -> bool:
    """Each slot is out again, under a higher fence."""
    seen = await fleet.flex()
    return all(seen[name]["flex"] == "lent" and seen[name]["fence"] > fence for name, fence in before.items())


async def test_an_agent_killed_while_its_slot_is_lent_starts_no_batch_under_that_fence(world, tmp_path, capsys):
    plane = ControlPlane(tmp_path)
    fleet = None
    try:
        fleet = await lent_fleet(world, plane, tmp_path)
        for round_ in range(3):
            await cp.until(fleet.all_lent_and_busy, 120)
            (slot,) = [name for name in (await fleet.agents["gpu-2"].health())["slots"] if name.startswith("f")]
            fence = (await fleet.flex())[slot]["fence"]
            await fleet.agents["gpu-2"].end(signal.SIGKILL)
            killed = time.monotonic()
            await fleet.start("gpu-2", "", 1)
            looks = 0
            while (seen := (await fleet.flex())[slot])["fence"] == fence or seen["flex"] != "lent":
                took = time.monotonic() - killed
                assert took < 120, f"it was not lent again: {seen}"
                if seen["fence"] == fence:
                    assert (seen["flex"], seen["running"]) == ("home", 0), "batch under the fence of before"
                    looks += 1
                await asyncio.sleep(0.02)
            assert looks, "the old fence was seen, and nothing ran under it"
            told_of = Trip.objects.filter(fence=fence, reason="restarted", slot__name=slot)
            assert await cp.in_database(told_of.exists)(), "the controller heard of it"
            grant = await cp.in_database(Grant.objects.get)(slot__name=slot)
            assert grant.fence == fence + 2, "one recall, one loan"
            with capsys.disabled():
                print(f"\n  kill {round_ + 1}: {slot} fence {fence}: {looks} looks at it, no batch; lent again under "
                      f"{seen['fence']} after {took:.1f} s")  # fmt: skip
    finally:
        if fleet is not None:
            await fleet.end()
        await plane.end()
