import pytest
from django.core.exceptions import ValidationError
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.wave_plan import Gates, Placeable, WavePlan, place, plans, read_waves

TEN = [Placeable(n, "a", f"a{n}") for n in range(10)]
THREE = [Placeable(n, "b", f"b{n}") for n in range(10, 13)]


def placed(agents, text: str) -> list[int]:
    found = place(agents, plans(read_waves(text)))
    return [found[agent.id] for agent in agents]


def test_percentages_are_shares_of_each_pool_and_reach_at_least_one():
    assert placed(TEN, "10, 50, 100") == [1, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert placed(TEN + THREE, "10%, 50, 100")[10:] == [1, 2, 3]


def test_what_is_named_goes_in_its_wave_and_counts_into_the_shares_that_follow():
    assert placed(TEN, "agent:a7 agent:a8, 30, 100") == [2, 3, 3, 3, 3, 3, 3, 1, 1, 3]
    assert placed(TEN + THREE, "pool:b, 100") == [2] * 10 + [1] * 3
    # what a later wave names is kept for it
    assert placed(TEN, "10, agent:a0, 100")[:2] == [2, 1]


@pytest.mark.parametrize(
    "text",
    ["", "50", "50, 50, 100", "0, 100", "100, agent:a1", "gpu-01, 100", "agent:, 100", "100, 50", "101", "9" * 5_000],
)
def test_unsound_waves_are_refused_with_what_to_write(text):
    with pytest.raises(ValidationError, match="100"):
        plans(read_waves(text))


def test_a_name_nobody_has_is_refused():
    with pytest.raises(ValidationError, match="gpu-99"):
        placed(TEN, "agent:gpu-99, 100")


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    percents=st.lists(st.integers(1, 99), unique=True, max_size=3),
    named=st.sets(st.integers(0, 11)),
)
def test_everybody_is_in_exactly_one_wave_and_no_share_is_passed_early(sizes, percents, named):
    agents = [
        Placeable(100 * pool + n, f"p{pool}", f"p{pool}-{n}") for pool, size in enumerate(sizes) for n in range(size)
    ]
    names = tuple(agent.name for agent in agents if agent.id in named)
    first = [WavePlan(None, agents=names)] if names else []
    waves = plans([*first, *sorted(percents), 100])
    found = place(agents, waves)
    assert found.keys() == {agent.id for agent in agents}
    for number, wave in enumerate(waves, 1):
        for pool, size in enumerate(sizes):
            members = [agent for agent in agents if agent.pool == f"p{pool}"]
            reached = sum(found[agent.id] <= number for agent in members)
            if wave.percent is not None:
                fixed = sum(agent.name in names for agent in members)
                assert reached == max(-(-size * wave.percent // 100), fixed)


def test_gates_say_which_number_cannot_be():
    with pytest.raises(ValidationError) as caught:
        Gates(hold_s=-1, burn_most=0.0, refusals_most_percent=101).check()
    assert set(caught.value.message_dict) == {"hold_s", "burn_most", "refusals_most_percent"}
