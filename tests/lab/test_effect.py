"""The effect of a draft: both policies on one recorded load, with refusals, waits and charges by tenant and class."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.core.pricing import RateCard, charge
from controlplane.lab.asking import ANSWER, answer_bytes
from controlplane.lab.items import JobSpec
from controlplane.lab.kinds import KINDS
from controlplane.lab.load_file import KeptLoad, load_as_bytes, read_load, stretch_of
from controlplane.lab.policies import bands, document_of
from controlplane.lab.scenario import Load
from controlplane.lab.simulator import START_US
from controlplane.lab.watching import Watch
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument, RatePolicy

PROMPT_PRICE, CACHED_PRICE, OUTPUT_PRICE = 1_400_000_000, 260_000_000, 4_400_000_000
CARD = RateCard(PROMPT_PRICE, CACHED_PRICE, OUTPUT_PRICE)


def a_load(requests: int = 400, *, per_s: float = 4.0, items: int = 30, seed: int = 3) -> KeptLoad:
    rng = Random(seed)
    work = Workload(("interactive",), ("acme", "globex"))
    at_us = 0.0
    for _ in range(requests):
        at_us += rng.expovariate(per_s) * 1e6
        prompt = rng.randint(10, 2_000)
        output = rng.randint(5, 100)
        for name, value in (
            ("at_us", round(at_us)), ("class_of", 0), ("tenant_of", int(rng.random() < 0.3)), ("prompt", prompt),
            ("output", output), ("asked", 2 * output), ("tail_100ns", 0),
        ):  # fmt: skip
            getattr(work, name).append(value)
    cached = [prompt // 3 for prompt in work.prompt]
    jobs = (JobSpec("night", "acme", "batch", [500] * items, [50] * items, deadline_us=600_000_000),) if items else ()
    return KeptLoad(Load(work, jobs), START_US, cached)


def a_policy(**changes: object) -> PolicyDocument:
    document = document_of(bands(2, 1, 1), ("acme", "globex"), places=2, safe_rate={2: 3.0, 3: 5.0}, **changes)
    rate = RatePolicy(
        rate_version=1, class_slug="interactive", model_id=1, effective_from="2026-01-01T00:00:00+00:00",
        prompt_nanos_per_mtok=PROMPT_PRICE, cached_nanos_per_mtok=CACHED_PRICE, output_nanos_per_mtok=OUTPUT_PRICE,
        gpu_nanos_per_slot_hour=0, discount_ppm=0,
    )  # fmt: skip
    return msgspec.structs.replace(document, rates=[rate])


def asked(tmp_path: Path, kept: KeptLoad, draft: PolicyDocument, *more: str, watch: Watch | None = None) -> dict:
    tmp_path.joinpath("load").write_bytes(load_as_bytes(kept))
    for name, document in (("current.json", a_policy()), ("draft.json", draft)):
        tmp_path.joinpath(name).write_bytes(msgspec.json.encode(document))
    arguments = [
        "--load", str(tmp_path / "load"), "--current", str(tmp_path / "current.json"), "--draft",
        str(tmp_path / "draft.json"), "--service", "base_ms=50,prompt_us=100,output_us=8000", *more,
    ]  # fmt: skip
    return json.loads(answer_bytes("effect", arguments, watch))


def test_the_same_policy_twice_has_no_effect(tmp_path):
    answer = asked(tmp_path, a_load(), a_policy(), "--objective-ms", "700")
    assert answer["current"] == answer["draft"]
    assert {row["change"] for row in answer["effects"]} <= {0, None}
    assert answer["load"] == {
        "recorded": 430, "replayed": 430, "whole": True, "requests": 400, "items": 30, "from_s": 0.0,
        "to_s": a_load().load.workload.at_us[-1] / 1e6,
    }  # fmt: skip


def test_its_progress_is_of_the_runs_that_are_told_of(tmp_path):
    told: list[tuple[float, int]] = []
    watch = Watch(lambda share, over: told.append((share, over)))
    asked(tmp_path, a_load(), a_policy(), watch=watch)
    assert watch.runs == KINDS["effect"].runs and max(share for share, _ in told) > 0.9


def test_charges_are_those_of_each_completed_request_by_tenant_and_class(tmp_path):
    kept = a_load(items=0)
    answer = asked(tmp_path, kept, a_policy(interactive={"max_prompt_tokens": 1_000}))
    work = kept.load.workload
    for name, longest in (("current", 200_000), ("draft", 1_000)):
        rows = {row["tenant"]: row for row in answer[name]["rows"]}
        for index, tenant in enumerate(work.tenants):
            own = [at for at in range(len(work)) if work.tenant_of[at] == index]
            fits = [at for at in own if work.prompt[at] <= longest]
            assert rows[tenant]["arrivals"] == len(own)
            too_long = len(own) - len(fits)
            assert rows[tenant]["refused"] == ({"prompt_too_long": too_long} if too_long else {})
            assert rows[tenant]["charge_nanos"] == sum(
                charge(
                    CARD, prompt_tokens=work.prompt[at], cached_tokens=kept.cached[at],
                    output_tokens=work.output[at], gpu_us=0,
                ).total_nanos
                for at in fits
            )  # fmt: skip
        assert answer[name]["charge_nanos"] == sum(row["charge_nanos"] for row in rows.values()) > 0
    assert answer["draft"]["charge_nanos"] < answer["current"]["charge_nanos"]


def test_a_tenant_that_the_draft_leaves_out_is_refused_and_counted(tmp_path):
    kept = a_load()
    draft = msgspec.structs.replace(a_policy(), tenants=[row for row in a_policy().tenants if row.slug == "acme"])
    answer = asked(tmp_path, kept, draft)
    globex = next(row for row in answer["draft"]["rows"] if row["tenant"] == "globex")
    gone = sum(kept.load.workload.tenant_of)
    assert globex["refused"] == {"not_in_policy": gone} and globex["arrivals"] == gone and not globex["completed"]
    assert answer["draft"]["not_in_policy"] == gone and answer["current"]["not_in_policy"] == 0


def test_a_larger_load_is_cut_to_a_stretch_that_the_seed_draws(tmp_path):
    first, second, other = (
        asked(tmp_path, a_load(), a_policy(), "--rows-max", "100", "--seed", seed)["load"] for seed in ("1", "1", "2")
    )
    assert first == second != other
    assert not first["whole"] and first["recorded"] == 430 and first["replayed"] == 99
    job = asked(tmp_path, a_load(), a_policy(), "--rows-max", "100")["current"]["jobs"][0]
    assert job["done"] == job["items"] == 6 and job["deadline_met"] is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(0, 40), st.integers(1, 120), st.integers(0, 5))
def test_a_stretch_is_neighbours_of_the_load_that_fit_the_bound(requests, items, most, seed):
    kept = a_load(requests, items=items)
    part = stretch_of(kept, most, seed)
    work, whole = part.kept.load.workload, kept.load.workload
    assert part.replayed == part.kept.rows <= max(most, 1) + 1 and part.recorded == kept.rows
    if kept.rows <= most:
        assert part.whole and part.kept == kept
    elif len(work):
        at = whole.at_us.index(part.from_us)
        assert [one + part.from_us for one in work.at_us] == whole.at_us[at : at + len(work)]
        assert work.prompt == whole.prompt[at : at + len(work)]
        assert part.kept.cached == kept.cached[at : at + len(work)]


def test_a_kept_load_is_read_back_as_it_was_and_nothing_else_is():
    kept = a_load()
    again = read_load(load_as_bytes(kept))
    assert again == replace(kept, load=again.load) and load_as_bytes(again) == load_as_bytes(kept)
    for wrong in (b"", b"nonsense", load_as_bytes(kept)[:-9]):
        with pytest.raises(ValueError, match="no recorded load"):
            read_load(wrong)


def test_a_process_of_its_own_gives_the_same_bytes_and_tells_how_far_it_is(tmp_path):
    arguments = ["--requests", "400", "--rate", "150"]
    run = subprocess.run(
        [sys.executable, "-m", "controlplane.lab", "batching", *arguments], cwd=tmp_path, capture_output=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "77"}, check=True, timeout=60,
    )  # fmt: skip
    assert "done" in json.loads(run.stdout.splitlines()[-1])
    assert tmp_path.joinpath(ANSWER).read_bytes() == answer_bytes("batching", arguments)
    bad = subprocess.run(
        [sys.executable, "-m", "controlplane.lab", "batching", "--rate", "0"], cwd=tmp_path, capture_output=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2])}, check=False, timeout=60,
    )  # fmt: skip
    assert bad.returncode == 1 and "the rate is above 0" in json.loads(bad.stdout)["error"]


def test_a_watch_tells_runs_and_their_shares():
    told: list[tuple[float, int]] = []
    watch = Watch(lambda share, over: told.append((share, over)))
    watch.begin(100)
    for at in range(200):
        watch.at(at)
    watch.end()
    assert told[0] == (0.0, 0) and told[-1] == (0.0, 1) and (1.0, 0) in told
    assert len(told) <= 103 and watch.runs == 1
