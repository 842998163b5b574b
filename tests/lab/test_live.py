"""The three stages over HTTP at a real agent: what clients saw is kept, counted after the warm-up, and simulated."""

from __future__ import annotations

import json
import sys
from math import ceil, log, log2
from pathlib import Path
from random import Random

import msgspec
import pytest

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.core.reasons import Outcome
from controlplane.embedded.ports import free_port
from controlplane.lab.arguments import read_model
from controlplane.lab.calibration import FEW, calibrated
from controlplane.lab.kinds import parsed
from controlplane.lab.live import add_arguments, climb, live, machine, measured, text
from controlplane.lab.live_load import BATCH, COMPLETED, INTERACTIVE, Seen, read_lines
from tests.agent import real_engine, worlds
from tests.agent.conftest import make_agent, pytest_asyncio_loop_factories
from tests.agent.test_real_engine import inference_server

__all__ = ["make_agent", "pytest_asyncio_loop_factories"]


def trace(
    folder: Path, name: str, requests: int, gap_s: float, prompt: tuple[int, int], output: tuple[int, int]
) -> Path:
    rng, path = Random(3), folder / name
    rows = [
        {"at": f"2026-10-01T00:00:{number * gap_s:09.6f}Z", "prompt_tokens": rng.randint(*prompt),
         "output_tokens": rng.randint(*output)}
        for number in range(requests)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(folder: Path, agent: worlds.Agent, document, *more: str) -> dict:
    policy = folder / "policy.json"
    policy.write_bytes(msgspec.json.encode(document))
    return parsed(
        add_arguments, "live",
        [f"--agent=http://127.0.0.1:{agent.port}", f"--model={worlds.MODEL}", "--key-env=LIVE_KEY",
         "--batch-key-env=LIVE_BATCH_KEY", "--interactive-class=chat", "--batch-class=bulk", f"--policy={policy}",
         f"--raw={folder / 'raw.jsonl'}", *more],
    )  # fmt: skip


@pytest.fixture
def keys(monkeypatch):
    monkeypatch.setenv("LIVE_KEY", worlds.SECRET)
    monkeypatch.setenv("LIVE_BATCH_KEY", worlds.BATCH_SECRET)


async def test_three_stages_at_an_agent_with_simulated_gpus(make_agent, tmp_path, keys):
    document = worlds.document()
    agent = await make_agent(document, speed=4.0)
    chat = trace(tmp_path, "chat.jsonl", 40, 0.05, (50, 900), (2, 12))
    bulk = trace(tmp_path, "bulk.jsonl", 10, 0.1, (50, 400), (5, 20))
    options = asked(
        tmp_path, agent, document, f"--trace={chat}", f"--batch={bulk}", "--at-once=3", "--seconds=1.5",
        "--warm-up=0.4",
        "--objective-ms=2000", "--target=0.9", "--rates", "0.5", "1",
    )  # fmt: skip
    answer = await measured(options)
    assert set(answer["stages"]) == {"interactive alone", "batch alone", "both"}
    assert answer["highest_rate_met"] == 1.0 and [row["met"] for row in answer["rates"]] == [True, True]
    assert answer["lowest_rate_missed"] is None and all(row["ttft_ms"]["p50"] for row in answer["rates"])
    raw = read_lines((tmp_path / "raw.jsonl").read_bytes())
    assert len(raw) == answer["requests"] and {one.kind for one in raw} == {INTERACTIVE, BATCH}
    warm = [one for one in raw if one.stage == "interactive alone, 1 times" and one.sent_us < 400_000]
    counted = [one for one in raw if one.stage == "interactive alone, 1 times" and one.sent_us >= 400_000]
    alone = answer["stages"]["interactive alone"]["measured"]
    assert warm and alone["offered"] == len(counted) and alone["completed"] == len(counted)
    assert all(
        one.told_tokens and one.request_id and one.served in ("chat", "bulk") for one in raw if one.end == COMPLETED
    )
    batch = answer["stages"]["batch alone"]["measured"]
    assert batch["batch_completed"] > 3 and batch["offered"] == 0 and batch["batch_tokens_per_s"] > 0
    # The agent recorded every request that a client says it completed.
    await agent.until(lambda: not agent.engine.calls)
    ended = {row.request_id for row in agent.closed_rows() if row.outcome == Outcome.COMPLETED.code}
    assert ended == {one.request_id for one in raw if one.end == COMPLETED}
    calibration = answer["calibration"]
    assert calibration["requests"] >= FEW and calibration["service"].startswith("base_ms=")
    # The curve of the simulated GPUs is known: a decode step of 29.8 ms and more, four times as fast.
    steps = [step for _, step in calibration["decode_ms"]]
    assert steps and 6.0 < min(steps) < 30.0
    for stage in answer["stages"].values():
        assert stage["simulated"]["offered"] == stage["measured"]["offered"]
    simulated = answer["stages"]["interactive alone"]["simulated"]
    assert simulated["completed"] == alone["completed"] and simulated["ttft_ms"]["p50"] > 0
    on = answer["machine"]
    assert on["cores"] >= 1 and on["python"] and on["flexband"] and on["cpu"]
    said = text(answer)
    assert "highest rate that met the objective: 1 times; none that was tried missed" in said
    assert "measured over HTTP" in said and "--service base_ms=" in said and "raw results of" in said


@pytest.mark.parametrize(
    ("holds_to", "rates", "precision", "low", "high"),
    [
        (2.7, [1.0, 2.0, 4.0], 0.05, 2.0, 4.0),
        (1.0, [1.0, 8.0], 0.5, 1.0, 8.0),
        (3.99, [4.0], 0.1, None, 4.0),
        (9.0, [1.0, 4.0], 0.1, 4.0, None),
        (2.0, [4.0, 1.0], 0.1, None, 4.0),
        (2.0, [2.0, 2.01], 0.1, 2.0, 2.01),
    ],
)
async def test_between_the_last_rate_that_met_and_the_first_that_missed_the_gap_is_halved(
    holds_to, rates, precision, low, high
):
    tried = []

    async def probe(rate: float) -> dict:
        tried.append(rate)
        return {"met": rate <= holds_to, "attained": 1.0 if rate <= holds_to else 0.5}

    found = await climb(rates, precision, probe)
    assert [row["rate"] for row in found.rows] == tried
    assert all(row["met"] == (row["rate"] <= holds_to) and row["attained"] for row in found.rows)
    rungs = [row["rate"] for row in found.rows if not row["halved"]]
    assert rungs == rates[: len(rungs)] and all(low < row["rate"] < high for row in found.rows if row["halved"])
    if low is None or high is None:
        assert (found.highest_met, found.lowest_missed) == (low, high) and len(found.rows) == len(rungs)
        return
    assert low <= found.highest_met <= holds_to < found.lowest_missed <= high
    assert found.lowest_missed <= found.highest_met * (1 + precision)
    # Not more stages than it takes: one before the last, the gap was too wide.
    assert len(tried) - len(rungs) == max(0, ceil(log2(log(high / low) / log(1 + precision))))


async def test_refusals_are_counted_apart_from_what_broke(make_agent, tmp_path, keys):
    document = worlds.document(
        classes=[worlds.class_policy(max_queue=0, max_wait_ms=0), worlds.class_policy("bulk", kind="batch")]
    )
    agent = await make_agent(document, speed=1.0)
    chat = trace(tmp_path, "chat.jsonl", 60, 0.01, (50, 90), (20, 30))
    options = asked(tmp_path, agent, document, f"--trace={chat}", "--seconds=1", "--warm-up=0", "--rates", "1", "2")
    answer = await measured(options)
    found = answer["stages"]["interactive alone"]["measured"]
    assert sum(found["refused"].values()) > 0 and not found["broken"]
    assert found["completed"] + sum(found["refused"].values()) == found["offered"]
    assert not found["met"] and answer["highest_rate_met"] is None and len(answer["rates"]) == 1


def test_what_cannot_be_measured_says_why(tmp_path, monkeypatch):
    chat = trace(tmp_path, "chat.jsonl", 3, 0.1, (5, 9), (2, 3))
    base = ["--agent=http://127.0.0.1:1", "--model=m", f"--trace={chat}", f"--raw={tmp_path / 'raw'}"]
    monkeypatch.delenv("FLEXBAND_KEY", raising=False)
    with pytest.raises(ValueError, match="no FLEXBAND_KEY"):
        live(parsed(add_arguments, "live", base))
    monkeypatch.setenv("FLEXBAND_KEY", "fb_x")
    with pytest.raises(OSError, match="no agent answers"):
        live(parsed(add_arguments, "live", base))
    for wrong in ("--seconds=0", "--target=0", "--at-once=0", "--rates=-1", "--precision=0", "--precision=nan"):
        with pytest.raises(ValueError):
            live(parsed(add_arguments, "live", [*base, wrong]))


def seen(number: int, prompt: int, output: int, queue_us: int = 0) -> Seen:
    first_us = number * 100_000 + queue_us + 20_000 + 100 * prompt
    return Seen("s", INTERACTIVE, 0, prompt, output, number * 100_000, first_us, first_us + 5_000 * output, 200,
                COMPLETED, queue_us, "chat", "r", True)  # fmt: skip


def test_a_curve_is_found_again_in_what_was_made_from_it():
    rng = Random(1)
    rows = [seen(number, rng.randint(10, 2_000), rng.randint(2, 80), rng.choice([0, 40_000])) for number in range(60)]
    found = calibrated(rows)
    assert found is not None and (found.service.base_us, found.service.prompt_us, found.service.output_us) == (
        20_000,
        100,
        5_000,
    )
    assert found.prefill_error < 0.01 and found.decode_error < 0.01
    assert calibrated(rows[: FEW - 1]) is None


def test_what_was_measured_is_a_curve_for_other_questions(tmp_path):
    path = tmp_path / "site.json"
    path.write_text(
        json.dumps({"calibration": {"prefill_ms": [[10, 20.0], [100, 50.0]], "decode_ms": [[1, 5], [4, 8]]}})
    )
    model = read_model(None, str(path))
    assert model.parts(55, 10, 1) == (35_000, 50_000) and model.parts(10, 10, 4) == (20_000, 80_000)
    for wrong in ({}, {"prefill_ms": [[1, 1]], "decode_ms": [[1, 1], [2, 2]]}, {"prefill_ms": 3, "decode_ms": 4}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="table"):
            read_model(None, str(path))


def test_the_machine_is_told_and_another_one_can_be_named():
    assert machine("8 H100")["engine_runs_on"] == "8 H100" and machine("")["engine_runs_on"] == "this machine"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(not real_engine.installed(), reason=real_engine.MISSING)
async def test_a_real_engine_is_measured_and_calibrated(make_agent, tmp_path, keys):
    document = worlds.document(pool={"slots": [worlds.slot(1, places=2), worlds.slot(2, "batch", places=2)]})
    port = free_port()
    async with inference_server(port):
        agent = await make_agent(document, backend=OpenAIBackend(f"http://127.0.0.1:{port}"))
        chat = trace(tmp_path, "chat.jsonl", 20, 0.4, (10, 60), (4, 8))
        bulk = trace(tmp_path, "bulk.jsonl", 5, 0.1, (10, 60), (8, 16))
        options = asked(
            tmp_path, agent, document, f"--trace={chat}", f"--batch={bulk}", "--at-once=1", "--seconds=8",
            "--warm-up=1",
            "--objective-ms=20000", "--target=0.5", "--quality-bound=0.2",
        )  # fmt: skip
        answer = await measured(options)
    print(text(answer), file=sys.stderr)
    assert answer["stages"]["both"]["measured"]["completed"] > 0
    assert answer["calibration"] is not None and answer["calibration"]["decode_ms"]
