"""Weighted virtual token counters: the bound of the method, lifts, ties, and progress for everyone."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.fairness import FairQueue, WorkPolicy, WorkUnit


def serve(queue: FairQueue, now: int, work: int) -> str | None:
    """Dispatch one request of `work` for the tenant whose turn it is; it stays backlogged."""
    queue.settle(now)
    tenant = queue.pop_least(now)
    if tenant is None:
        return None
    queue.charge(tenant, work)
    queue.push(tenant)
    return tenant.slug


def test_ties_go_to_the_first_slug() -> None:
    queue = FairQueue()
    for slug in "cab":
        queue.join(queue.tenant(slug))
    assert [serve(queue, 0, 5) for _ in range(6)] == list("abcabc")


@given(
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=2, max_size=40, unique=True),
    st.lists(st.integers(-2, 2), min_size=40, max_size=40),
)
def test_the_least_counter_goes_first_and_then_the_slug_in_whatever_order_they_came(slugs, counters) -> None:
    queue, standing = FairQueue(scale=1), []
    for slug, counter in zip(slugs, counters, strict=False):
        tenant = queue.tenant(slug)
        tenant.counter, tenant.backlogged = counter, True
        queue.push(tenant)
        standing.append((counter, slug))
    named = [queue.pop_least(0) for _ in slugs]
    assert [(one.counter, one.slug) for one in named if one is not None] == sorted(standing)


def test_however_many_come_between_two_ties_go_to_the_first_slug() -> None:
    # Each comes right behind "a": the room between two places is soon used up, with all of them waiting.
    slugs = ["a", "b", *("a" * more + "b" for more in range(1, 100))]
    queue = FairQueue()
    for slug in slugs:
        tenant = queue.tenant(slug)
        tenant.backlogged = True
        queue.push(tenant)
        places = [queue.tenants[one].place for one in sorted(queue.tenants)]
        assert places == sorted(set(places)), slug
    named = [queue.pop_least(0) for _ in slugs]
    assert [one.slug for one in named if one is not None] == sorted(slugs)


def test_equal_weighted_service_ties_exactly_for_thirds() -> None:
    queue = FairQueue()
    queue.join(queue.tenant("a", 1))
    queue.join(queue.tenant("b", 3))
    assert "".join(serve(queue, 0, 200) or "" for _ in range(9)) == "abbbabbba"


def test_one_that_comes_back_is_lifted_to_the_least_backlogged() -> None:
    queue = FairQueue()
    queue.join(queue.tenant("a"))
    for _ in range(10):
        serve(queue, 0, 7)
    queue.join(queue.tenant("b"))
    queue.settle(0)
    assert queue.tenants["b"].counter == queue.tenants["a"].counter


def test_with_nobody_waiting_the_lift_is_to_the_last_that_left_with_its_output() -> None:
    queue = FairQueue(scale=1)
    a = queue.tenant("a")
    queue.join(a)
    queue.settle(0)
    assert queue.pop_least(0) is a
    queue.charge(a, 100)
    queue.start_linear(a, 50, 0, 10)
    queue.leave(a)
    queue.join(queue.tenant("b"))
    queue.settle(6)
    assert queue.tenants["b"].counter == 130


def test_those_who_join_at_one_instant_are_lifted_alike() -> None:
    queue = FairQueue(scale=1)
    for slug in "ab":
        queue.tenant(slug).counter = {"a": 90, "b": 40}[slug]
        queue.join(queue.tenants[slug])
    queue.settle(0)
    assert [queue.tenants[slug].counter for slug in "ab"] == [90, 40]


def test_a_withdrawn_tenant_sets_no_mark() -> None:
    queue = FairQueue(scale=1)
    queue.join(queue.tenant("a"))
    queue.settle(0)
    a = queue.pop_least(0)
    assert a is not None
    queue.charge(a, 500)
    queue.leave(a)
    newcomer = queue.tenant("b")
    queue.join(newcomer)
    queue.withdraw(newcomer)
    queue.join(queue.tenant("c"))
    queue.settle(0)
    assert queue.tenants["c"].counter == 500
    assert queue.pop_least(0) is queue.tenants["c"]
    assert queue.pop_least(0) is None


def test_taking_work_back_moves_a_tenant_forward() -> None:
    queue = FairQueue(scale=1)
    for slug, work in (("a", 30), ("b", 20)):
        queue.join(queue.tenant(slug))
        queue.charge(queue.tenants[slug], work)
    queue.settle(0)
    queue.charge(queue.tenants["a"], -15)
    least = queue.pop_least(0)
    assert least is not None and (least.slug, least.counter) == ("a", 15)


def test_linear_output_ends_at_what_it_really_was() -> None:
    queue = FairQueue(scale=1)
    a = queue.tenant("a")
    linear = queue.start_linear(a, 100, 0, 10)
    assert [a.accrue(t) for t in (3, 3, 7, 50)] == [30, 30, 70, 100]
    queue.stop_linear(a, linear, 60)
    assert (a.counter, a.running) == (60, 0)


def test_units_of_work() -> None:
    tokens = WorkPolicy(WorkUnit.TOKENS, 1, 2)
    assert (tokens.at_dispatch(100), tokens.afterwards(50, 9)) == (100, 100)
    requests = WorkPolicy(WorkUnit.REQUESTS)
    assert (requests.at_dispatch(100), requests.afterwards(50, 9)) == (1, 0)
    gpu = WorkPolicy(WorkUnit.GPU_TIME)
    assert (gpu.at_dispatch(100), gpu.afterwards(50, 9)) == (0, 9)


def test_a_weight_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        FairQueue().tenant("a", 0)


def test_one_that_was_forgotten_leaves_no_place_behind() -> None:
    queue = FairQueue()
    for slug in ("a", "b", "c"):
        queue.tenant(slug)
    queue.forget("b")
    places = [queue.tenant(slug).place for slug in ("a", "aa", "b", "bb", "c")]
    assert places == sorted(set(places))


def test_an_idle_tenant_can_be_forgotten_a_waiting_one_not() -> None:
    queue = FairQueue()
    queue.tenant("a")
    queue.join(queue.tenant("b"))
    queue.forget("a")
    queue.forget("b")
    assert set(queue.tenants) == {"b"}


@given(
    seed=st.integers(0, 10**6),
    weights=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    places=st.integers(1, 6),
    prompt_most=st.integers(1, 400),
    output_most=st.integers(1, 200),
)
@settings(max_examples=50, deadline=None)
def test_two_backlogged_tenants_stay_within_the_bound(seed, weights, places, prompt_most, output_most) -> None:
    """|W_a / w_a - W_b / w_b| <= 2 max(w_p x largest prompt, w_o x M) / the smaller weight since both began to wait.

    One dispatch and all output running can put a tenant ahead, so between any two instants it is at most twice that.
    """
    rng, policy = random.Random(seed), WorkPolicy()
    queue = FairQueue()
    tenants = {slug: queue.tenant(slug, weight) for slug, weight in zip("ab", weights, strict=True)}
    for tenant in tenants.values():
        queue.join(tenant)
    served = dict.fromkeys("ab", 0)
    running: list[list] = []
    gaps = []
    for now in range(300):
        queue.settle(now)
        while len(running) < places:
            tenant = queue.pop_least(now)
            prompt = rng.randint(1, prompt_most)
            queue.charge(tenant, policy.at_dispatch(prompt))
            served[tenant.slug] += policy.at_dispatch(prompt)
            queue.push(tenant)
            running.append([tenant, rng.randint(0, output_most)])
            gaps.append(served["a"] / weights[0] - served["b"] / weights[1])
        for item in running:
            produced = min(item[1], rng.randint(0, 20))
            item[1] -= produced
            queue.charge(item[0], policy.afterwards(produced, 0))
            served[item[0].slug] += policy.afterwards(produced, 0)
        running = [item for item in running if item[1] > 0]
        gaps.append(served["a"] / weights[0] - served["b"] / weights[1])
    bound = 2 * max(prompt_most, 2 * places * output_most) / min(weights)
    # the scale divides by whole weights up to 16, so nothing is lost to rounding
    assert max(map(abs, gaps)) <= bound + 1e-6
    assert max(gaps) - min(gaps) <= 2 * (prompt_most + 2 * places * output_most) / min(weights) + 1e-6


@given(seed=st.integers(0, 10**6), tenants=st.integers(2, 20))
@settings(max_examples=40, deadline=None)
def test_nobody_starves_and_the_least_is_always_served(seed: int, tenants: int) -> None:
    rng, queue = random.Random(seed), FairQueue()
    names = [f"t{i:02}" for i in range(tenants)]
    weights = {name: rng.randint(1, 5) for name in names}
    for name in names:
        queue.join(queue.tenant(name, weights[name]))
    last = dict.fromkeys(names, 0)
    for turn in range(400):
        queue.settle(turn)
        least = min(tenant.accrue(turn) for tenant in queue.tenants.values())
        tenant = queue.pop_least(turn)
        assert tenant is not None and tenant.counter == least
        queue.charge(tenant, rng.randint(50, 100))
        queue.start_linear(tenant, rng.randint(0, 50), turn, rng.randint(1, 9))
        queue.push(tenant)
        last[tenant.slug] = turn
    # each turn is 50 to 150 of work: between two turns of one tenant every other gets at most its weight's worth
    assert min(last.values()) >= 400 - 4 * sum(weights.values()) - tenants


@given(seed=st.integers(0, 10**6), tenants=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_whoever_stands_anywhere_may_go_and_come_back_and_the_first_is_the_least(seed: int, tenants: int) -> None:
    rng, queue = random.Random(seed), FairQueue(scale=12)
    names = [f"t{number:02}" for number in range(tenants)]
    standing: set[str] = set()
    running: list[tuple] = []
    for now in range(300):
        tenant = queue.tenant(rng.choice(names), rng.choice([1, 1, 2, 3]))
        what = rng.randrange(7)
        if what == 0:
            queue.join(tenant)
            queue.settle(now)
            standing.add(tenant.slug)
        elif what == 1 and tenant.slug in standing:
            queue.withdraw(tenant)
            standing.discard(tenant.slug)
        elif what == 2:
            queue.charge(tenant, rng.randint(-40, 60))
        elif what == 3 and (first := queue.least(now)) is not None:
            queue.charge(first, rng.randint(0, 40))
            running.append((first, queue.start_linear(first, rng.randint(0, 90), now, rng.randint(1, 40))))
            queue.served(first)
        elif what == 4 and (first := queue.least(now)) is not None:
            queue.leave(first)
            standing.discard(first.slug)
        elif what == 5 and running:
            queue.stop_linear(*running.pop(rng.randrange(len(running))), rng.randint(0, 90))
        elif what == 6 and (first := queue.pop_least(now)) is not None:
            queue.push(first)
        first = queue.least(now)
        owed = min(((queue.tenants[name].accrue(now), name) for name in standing), default=None)
        assert (None if first is None else (first.counter, first.slug)) == owed
    while (first := queue.pop_least(300)) is not None:
        assert (first.counter, first.slug) == min((queue.tenants[name].accrue(300), name) for name in standing)
        standing.discard(first.slug)
    assert not standing


@given(st.lists(st.integers(0, 60), min_size=12, max_size=60), st.data())
def test_whoever_leaves_from_the_middle_leaves_the_others_in_order(counters: list[int], data) -> None:
    queue = FairQueue(scale=1)
    for number, counter in enumerate(counters):
        tenant = queue.tenant(f"t{number:02}")
        tenant.counter, tenant.backlogged = counter, True
        queue.push(tenant)
    for _ in range(10):
        queue.withdraw(data.draw(st.sampled_from(queue._heap[: queue._in_heap])))
        heap = queue._heap[: queue._in_heap]
        assert [tenant.heap_at for tenant in heap] == list(range(len(heap)))
        for at in range(1, len(heap)):
            above, one = heap[(at - 1) // 2], heap[at]
            assert (above.heap_key, above.place) < (one.heap_key, one.place)
