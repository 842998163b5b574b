"""Giving back what another agent could run at once: everybody ends together, and nothing goes to and fro."""

from hypothesis import example, given
from hypothesis import strategies as st

from controlplane.core.item_balance import Holding, excess

AGENTS = st.lists(
    st.tuples(st.integers(0, 2_000), st.integers(0, 2_000)).filter(lambda row: sum(row) > 0), min_size=2, max_size=6
)


def holdings(rows) -> list[Holding]:
    return [Holding(held, held + room) for held, room in rows]


def around(agents: list[Holding]) -> list[int]:
    return [excess(own, [*agents[:at], *agents[at + 1 :]]) for at, own in enumerate(agents)]


def test_who_holds_all_keeps_its_part_of_it():
    assert excess(Holding(60, 60), [Holding(0, 60)]) == 30
    assert excess(Holding(60, 60), [Holding(0, 30)]) == 20, "the other is half as fast"
    assert excess(Holding(60, 60), [Holding(20, 60)]) == 0, "it has half of its part: it is not without work soon"
    assert excess(Holding(30, 900), [Holding(0, 60)]) == 0, "two seconds of work are not handed over"
    assert excess(Holding(30, 60), [Holding(0, 6_000)]) == 29, "however fast the other is"
    assert excess(Holding(5, 12), [Holding(0, 8)]) == 0, "it would take both of the two items again"
    assert excess(Holding(60, 60), []) == excess(Holding(60, 60), [Holding(0, 0)]) == 0


@given(AGENTS)
def test_nobody_is_left_with_less_than_its_part_and_nobody_short_gives(rows):
    agents = holdings(rows)
    held, capacity = sum(one.held for one in agents), sum(one.capacity for one in agents)
    for own, given_back in zip(agents, around(agents), strict=True):
        assert 0 <= given_back <= own.held
        if given_back:
            assert (own.held - given_back) * capacity >= held * own.capacity
            assert any(2 * one.held * capacity < held * one.capacity for one in agents)


@given(AGENTS)
@example([(5, 7), (0, 8)])
def test_after_a_few_reports_nobody_is_asked_again(rows):
    agents = holdings(rows)
    for _ in range(8):
        agents = shared_out(agents, around(agents))
    assert not any(around(agents))


def shared_out(agents: list[Holding], given_back: list[int]) -> list[Holding]:
    """What was given back goes to those with room, in proportion to it: as too little work is leased."""
    kept = [own.held - back for own, back in zip(agents, given_back, strict=True)]
    rooms = [own.capacity - held for own, held in zip(agents, kept, strict=True)]
    left, free, after = sum(given_back), sum(rooms), []
    for own, held, room in zip(agents, kept, rooms, strict=True):
        taken = min(left, -(-left * room // free)) if free else 0
        left, free = left - taken, free - room
        after.append(Holding(held + taken, own.capacity))
    return after
