"""Questions to the lab: what is read, both models on one trace, and the table of a what-if."""

from __future__ import annotations

from datetime import datetime

import pytest

from controlplane.lab.arguments import (
    Places,
    read_changes,
    read_counts,
    read_job_use,
    read_policy,
    read_safe_rate,
    read_trace_use,
)
from controlplane.lab.policies import bands, changed, document_of
from controlplane.lab.reference import Rules, fifo_recursion
from controlplane.lab.scenario import JobUse, Load, TraceUse, effects, load, run_policy, run_reference
from controlplane.lab.service import Constants, read_service
from tests.lab import nights
from tests.lab.nights import azure_file, mooncake_file

SERVICE = Constants(50_000, 125, 30_000)


def test_the_reference_model_says_of_a_trace_what_the_recursion_says_at_100_ns(tmp_path):
    path = azure_file(tmp_path, 600)
    answer = run_reference(Rules(3), load([TraceUse(path, "interactive")]), SERVICE, frozenset(), objective_ms=700)
    times = [line.rsplit(",", 2) for line in path.read_text().replace("\r", "").split("\n")[1:]]
    instants = []
    for text, _, _ in times:
        whole, fraction = text.split(".")
        seconds = (datetime.fromisoformat(whole) - datetime(2023, 11, 16)).total_seconds()
        instants.append(int(seconds) * 10_000_000 + int(fraction))
    at = [instant - min(instants) for instant in instants]
    service = [10 * (50_000 + 125 * int(prompt) + 30_000 * int(output)) for _, prompt, output in times]
    waits = sorted(start - now for start, now in zip(fifo_recursion(at, service, 3), at, strict=True))
    found = answer["all"]["wait_ms"]
    assert found["max"] == waits[-1] / 10_000 and found["mean"] == pytest.approx(sum(waits) / 600 / 10_000)
    for percent in (50, 90, 95, 99):
        assert found[f"p{percent}"] == waits[-(-percent * 600 // 100) - 1] / 10_000
    assert answer["all"]["in_system_mean"] == pytest.approx(answer["all"]["lambda_x_w"], rel=1e-12)
    within = sum(wait <= 7_000_000 for wait in waits)
    assert answer["all"]["within_objective_of_arrivals"] == within / 600


def test_tenants_are_drawn_by_seed_and_kept_where_a_trace_names_them(tmp_path):
    path = azure_file(tmp_path, 200)
    first, again, other = (
        load([TraceUse(path, "interactive")], tenants=6, seed=seed).workload.tenant_of for seed in (1, 1, 2)
    )
    assert first == again != other and len(set(first)) > 3
    own = tmp_path / "own.jsonl"
    own.write_text(
        '{"at":"2026-10-01T00:00:00Z","prompt_tokens":5,"output_tokens":2,"tenant":"zeta"}\n'
        '{"at":"2026-10-01T00:00:01Z","prompt_tokens":5,"output_tokens":2,"tenant":"acme"}\n'
    )
    work = load([TraceUse(own, "interactive")]).workload
    assert work.tenants == ("acme", "zeta") and work.tenant_of == [1, 0]


def test_a_rate_a_stretch_and_a_cut_change_a_trace(tmp_path):
    path = azure_file(tmp_path, 300)
    plain = load([TraceUse(path, "interactive")]).workload
    fast = load([TraceUse(path, "interactive", rate=2.0, stretch=3.0)], hours=plain.at_us[-1] / 4 / 3.6e9).workload
    assert 0 < len(fast) < len(plain)
    assert fast.at_us[-1] < plain.at_us[-1] / 4
    assert fast.prompt[0] == 3 * plain.prompt[0]


def test_bad_lines_are_named_and_good_ones_kept(tmp_path):
    path = mooncake_file(tmp_path, 20)
    path.write_text(path.read_text() + "no JSON\n")
    given = load([], [JobUse(path, 1.0, copies=2)])
    assert [bad.line for bad in given.refused["mooncake.jsonl"]] == [21]
    assert len(given.jobs[0].prompts) == 40 and given.jobs[0].deadline_us == 3_600_000_000


def test_a_what_if_says_what_a_change_does_to_each_class_and_job(tmp_path):
    given = load(
        [TraceUse(azure_file(tmp_path, 500), "interactive")], [JobUse(mooncake_file(tmp_path, 150), 0.1)], tenants=3
    )
    document = document_of(
        bands(2, 2, 1), given.workload.tenants, places=4, safe_rate={2: 30, 4: 60}, prefill_us_per_token=30,
        decode_us_per_token=8_000, flex={"lend_hold_s": 10, "cooldown_s": 10, "decision_interval_s": 5},
    )  # fmt: skip
    never = changed(document, {"pool.flex.max_lent": 0})
    answers = [run_policy(policy, given, SERVICE, objective_ms=500) for policy in (never, document)]
    table = {(row["of"], row["figure"]): row for row in effects(*answers)}
    lends, finished = table["pool", "lends"], table["job mooncake", "finished after, s"]
    assert lends["current"] == 0 and lends["change"] == lends["proposed"] > 0
    assert finished["change"] == finished["proposed"] - finished["current"] < 0
    assert ("class interactive", "TTFT p99, ms") in table
    assert all(row["change"] == 0 for row in effects(answers[0], answers[0]) if row["change"] is not None)


def test_arguments_are_read_and_mistakes_named(tmp_path):
    assert read_trace_use("/a:b/c.csv:class=batch:rate=2") == TraceUse(tmp_path.__class__("/a:b/c.csv"), "batch", 2.0)
    assert read_job_use("x.jsonl:deadline_h=8:copies=3").copies == 3
    assert read_counts(["interactive=4"], ("interactive", "batch")) == {"interactive": 4}
    assert read_safe_rate("4=8,8=16.5") == {4: 8.0, 8: 16.5}
    assert read_changes(["pool.isolation=shared", "pool.flex.max_lent=0"]) == {
        "pool.isolation": "shared", "pool.flex.max_lent": 0,
    }  # fmt: skip
    assert read_service("base_ms=50,prompt_us=125,output_us=30000") == SERVICE
    for wrong in (
        lambda: read_trace_use("x.csv:rate=fast"), lambda: read_job_use("x:copies=0"),
        lambda: read_counts(["a=1"], ("b",)),
        lambda: read_safe_rate("4"), lambda: read_changes(["x"]), lambda: read_service("base_ms=-1"),
        lambda: read_service("speed=1"), lambda: read_service("output_us=0.5"),
        lambda: changed(document_of(["interactive"], ["a"]), {"pool.flex.nothing": 1}),
        lambda: changed(document_of(["interactive"], ["a"]), {"pool.flex.max_lent": "many"}),
        lambda: read_policy("reserved", Places(2, 1, {"interactive": 3}), ["a"], {}),
        lambda: read_policy("fifo", Places(2, 1, {}), ["a"], {"pool.isolation": "shared"}),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            wrong()


def test_a_policy_is_read_from_a_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(
        "slots: {interactive: 2, flex: 1, batch: 1}\nplaces: 6\nsafe_rate: {2: 9.5}\nflex: {lend_p95_ms: 150}\n"
    )
    document = read_policy(str(path), Places(8, 1, {}), ["a"], {"classes.interactive.max_queue": 7})
    assert [slot.band for slot in document.pool.slots] == ["interactive", "interactive", "flex", "batch"]
    assert document.pool.flex.lend_p95_ms == 150 and document.classes[0].max_queue == 7
    path.write_text("slots: {interactive: 2}\nspeed: 3\n")
    with pytest.raises(ValueError, match="unknown speed"):
        read_policy(str(path), Places(8, 1, {}), ["a"], {})


def test_nothing_new_is_lent_while_the_band_is_frozen():
    """As after a page-level burn: loans run on, none begins."""
    work, jobs = nights.traffic(12, 2, 3), (nights.job(2_200, 12),)

    def lent(*frozen_us: tuple[int, int]) -> list[float]:
        flex = run_policy(nights.band(), Load(work, jobs, frozen_us=frozen_us), nights.SERVICE)["flex"]
        return [loan["lent_s"] for loan in flex["loans"]]

    free = lent()
    assert len(free) > 1
    assert lent((0, 1 << 62)) == []
    assert lent((round(free[0] * 1e6) + 1, 1 << 62)) == free[:1]
    assert lent((0, round(free[1] * 1e6)))[0] == free[1], "and when its time is over, at once"
