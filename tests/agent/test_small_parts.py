"""Clocks, ids, windows, files, curves: the parts that fit on a page."""

import asyncio
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from controlplane.agent import identity
from controlplane.agent.atomic_file import write_atomic
from controlplane.agent.backends.curves import A100, CURVES, H100
from controlplane.agent.backends.request import BackendRequest
from controlplane.agent.backoff import MAX_S, backoff_s
from controlplane.agent.clock import Clock, boot_us
from controlplane.agent.errors import AgentError
from controlplane.agent.request_ids import new_request_id
from controlplane.agent.sliding import Flow, Presence, WindowCount
from controlplane.wire import signing
from tests.agent import worlds

S = 1_000_000
ROOT = Path(__file__).parents[2]


def test_request_ids_are_uuid7_and_sort_by_arrival():
    ids = [new_request_id(1_800_000_000_000_000 + n * 1000) for n in range(100)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 100
    parsed = uuid.UUID(ids[0])
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == 1_800_000_000_000


def test_the_clock_never_goes_back(monkeypatch):
    clock = Clock()
    before = clock.now_us()
    real = time.time_ns
    monkeypatch.setattr("controlplane.agent.clock.time.time_ns", lambda: real() - 3600 * 10**9)
    clock.adjust(idle=True)
    assert clock.now_us() >= before - 50_000
    monkeypatch.setattr("controlplane.agent.clock.time.time_ns", lambda: real() + 3600 * 10**9)
    clock.adjust(idle=False)
    assert clock.now_us() < before + 10 * S, "not while something runs"
    clock.adjust(idle=True)
    assert clock.now_us() >= before + 3599 * S
    assert boot_us() > 0


def test_presence_agrees_with_littles_law():
    presence, rng, now_us = Presence(0), random.Random(3), 0
    ends: list[tuple[int, int]] = []
    for _ in range(4000):
        now_us += round(rng.expovariate(20) * S)
        for end in sorted(e for e in ends if e[0] <= now_us):
            presence.depart(*end)
            ends.remove(end)
        presence.arrive(now_us)
        residence = round(rng.expovariate(0.5) * S)
        ends.append((now_us + residence, residence))
    figures = presence.sums(now_us).figures(now_us)
    assert figures.arrivals_per_s == pytest.approx(20, rel=0.1)
    assert figures.present_mean == pytest.approx(figures.arrivals_per_s * figures.residence_mean_us / S, rel=0.2)


def test_presence_forgets_what_is_older_than_its_window():
    presence = Presence(0)
    for second in range(1, 11):
        presence.arrive(second * S)
        presence.depart(second * S + S // 2, S // 2)
    assert not presence.quiet(299 * S)
    figures = presence.sums(307 * S).figures(307 * S)
    assert figures.departures == 6, "of the seconds from 5 on: steps are of 5 s"
    assert figures.residence_mean_us == S // 2
    assert figures.present_mean == pytest.approx(6 * 0.5 / 300)
    assert presence.quiet(316 * S)
    assert presence.sums(316 * S).departures == 0


def test_however_long_it_runs_presence_keeps_one_window():
    presence, departed_us = Presence(0), []
    for second in range(1, 3_000, 3):
        presence.arrive(second * S)
        presence.depart(second * S + S // 2, S // 2)
        departed_us.append(second * S + S // 2)
        now_us = second * S + S
        since_us = (now_us // (5 * S) - 60) * 5 * S
        inside = sum(at_us >= since_us for at_us in departed_us)
        sums = presence.sums(now_us)
        assert (sums.arrivals, sums.departures, sums.residence_us) == (inside, inside, inside * S // 2), second
        assert sums.integral_us == inside * S // 2
        assert len(presence._steps) <= (61 + 16) * 5


def test_windows_forget():
    count, flow = WindowCount(60, 0), Flow(1, 11, 2, 0)
    count.add("a", 0)
    count.add("a", 59 * S, 2)
    assert count.totals(59 * S) == {"a": 3}
    assert count.totals(60 * S) == {"a": 2}
    assert count.per_s("a", 60 * S) == pytest.approx(2 / 60)
    flow.admit(10, 0)
    flow.refuse(20, 9 * S)
    assert flow.demand(9 * S) == (2, 30, 1, 1)
    assert flow.demand(10 * S) == (1, 20, 1, 1)
    assert flow.demand(19 * S) == (0, 0, 0, 1), "whoever is here still asks for a place"
    assert flow.present == 1 and flow.sums(19 * S).arrivals == 1
    flow.depart(20 * S, 20 * S)
    assert flow.demand(20 * S) is None


def test_files_are_whole_and_private(tmp_path):
    path = tmp_path / "f"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_the_key_is_made_once_and_must_be_private(tmp_path):
    first, second = identity.load(tmp_path / "s"), identity.load(tmp_path / "s")
    assert first.public_key == second.public_key
    path = tmp_path / "s" / identity.KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(AgentError, match="chmod 600"):
        identity.load(tmp_path / "s")
    path.chmod(0o600)
    path.write_bytes(b"not a key")
    with pytest.raises(AgentError, match="cannot be used"):
        identity.load(tmp_path / "s")


def test_signing_keys_are_told_apart_by_use():
    keys = worlds.trust().signing_keys
    assert identity.signing_key(keys, "policy", worlds.KID) == signing.from_text(keys[f"policy:{worlds.KID}"])
    assert identity.signing_key(keys, "policy", f"policy:{worlds.KID}")
    assert identity.signing_key({f"live:{worlds.KID}": "AA=="}, "policy", worlds.KID) is None


def test_backoff_grows_and_is_bounded():
    for failures in range(40):
        assert 0 < backoff_s(failures) <= MAX_S
    assert max(backoff_s(20) for _ in range(50)) > 2 * max(backoff_s(0) for _ in range(50))


@pytest.mark.parametrize("curve", CURVES.values(), ids=lambda curve: curve.name)
def test_curves_grow(curve):
    prefills = [curve.prefill_us(n) for n in range(1, 20_000, 97)]
    decodes = [curve.decode_us(n) for n in range(1, 129)]
    assert prefills == sorted(prefills) and decodes == sorted(decodes)
    assert curve.prefill_us(1024) == 1000 * dict(curve.prefill_ms)[1024]


def test_between_facts_lies_the_straight_line():
    assert H100.prefill_us(1536) == pytest.approx(1000 * (77.9 + 136.8) / 2)
    assert A100.decode_us(48) == pytest.approx(1000 * (53.0 + 71.6) / 2)
    assert H100.decode_us(128) == pytest.approx(1000 * (50.2 + 2 * (50.2 - 38.6)))


class Taken:
    """A sink that keeps what it is told."""

    def __init__(self) -> None:
        self.data, self.tokens, self.usage, self.failure = b"", 0, None, None

    def prefill_began(self) -> None: ...

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        self.data += data
        self.tokens += tokens

    def finished(self, usage, body: bytes) -> None:
        self.data += body
        self.usage = usage

    def failed(self, failure) -> None:
        self.failure = failure


def request(body: bytes = b"{}", **changes) -> BackendRequest:
    base = {
        "request_id": "r", "path": "/v1/completions", "body": body, "model": "m", "slot_id": 1, "stream": False,
        "wants_usage": False, "prompt_tokens": 100, "max_output_tokens": 50, "n": 1, "priority": 0,
    }  # fmt: skip
    return BackendRequest(**{**base, **changes})


async def run(backend, *requests) -> list[Taken]:
    sinks = [Taken() for _ in requests]
    for one, sink in zip(requests, sinks, strict=True):
        backend.start(one, sink)
    while any(sink.usage is None and sink.failure is None for sink in sinks):
        await asyncio.sleep(0.001)
    return sinks


async def test_the_same_seed_gives_the_same_words_and_lengths():
    bodies = [b'{"prompt":"%d"}' % n for n in range(20)]
    first = await run(worlds.sim(seed=4), *map(request, bodies))
    again = await run(worlds.sim(seed=4), *map(request, bodies))
    other = await run(worlds.sim(seed=5), *map(request, bodies))
    lengths = [sink.usage.output_tokens for sink in first]
    assert lengths == [sink.usage.output_tokens for sink in again]
    assert lengths != [sink.usage.output_tokens for sink in other]
    assert len(set(lengths)) > 5 and max(lengths) <= 50


async def test_a_step_takes_as_long_as_its_batch_says():
    """One request of 10 tokens alone: prefill of 100 tokens, then 9 decode steps of a batch of one."""
    backend, loop = worlds.sim(speed=1.0), asyncio.get_running_loop()
    expected_s, took_s = (H100.prefill_us(100) + 9 * H100.decode_us(1)) / 1e6, []
    for _ in range(5):
        began = loop.time()
        await run(backend, request(max_output_tokens=10, ignore_eos=True))
        took_s.append(loop.time() - began)
    assert expected_s * 0.9 < min(took_s) < expected_s * 1.6 + 0.1, "the shortest: the machine's other work adds"


async def test_memory_makes_requests_wait_and_what_never_fits_fails():
    backend = worlds.sim(speed=0.0)
    backend.set_slots({1: 200})
    fits, too_large = await run(backend, request(), request(prompt_tokens=500))
    assert fits.usage is not None
    assert too_large.failure.status == 400


def test_the_agent_runs_where_django_numpy_and_psycopg_are_not_installed():
    """kombu looks for Django where there is one; nothing of ours does."""
    script = (
        "import sys\n"
        "for name in ('django', 'numpy', 'psycopg', 'celery'): sys.modules[name] = None\n"
        "import controlplane.agent.cli\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)
