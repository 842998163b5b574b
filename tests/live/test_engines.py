"""What engines say of themselves reaches the page as said: a dash where they say nothing, and lines over time."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest
from django.urls import reverse

from controlplane.fleet.models import AgentLive
from controlplane.live import engines, readings, topics
from controlplane.live.frames import LAST_PREFIX, Publisher, Ticker
from controlplane.live.queues import AgentWord
from controlplane.wire.report import EngineLive
from tests.factories import person

VLLM = EngineLive("vLLM", running=24, waiting=3, kv_used=0.83)
TRITON = EngineLive("Triton", gpu_used_bytes=60 << 30, gpu_total_bytes=80 << 30, inferences=1_000, executions=100)


def say(agent, at, engine):
    row = AgentLive.objects.get(agent=agent)
    figures = {**row.figures, "engine": None if engine is None else msgspec.to_builtins(engine)}
    AgentLive.objects.filter(agent=agent).update(reported_at=at, figures=figures)


def word(at, engine, *, slots=(), agent_id=1):
    said = {"engine": None if engine is None else msgspec.to_builtins(engine), "slots": list(slots)}
    return AgentWord(agent_id=agent_id, name=f"a{agent_id}", pool_id=1, reported_at=at, figures=said)


def test_each_server_is_shown_with_what_it_tells_and_dashes_for_the_rest(scene, moment):
    say(scene.agents[0], moment, VLLM)
    say(scene.agents[1], moment, TRITON)
    state = topics.pool_state(readings.read(moment), scene.pool)
    first, second = state["engines"]
    assert (first["engine"], first["running"], first["kv_used"], first["gpu_used"]) == ("vLLM", 24, 0.83, None)
    assert (second["engine"], second["running"], second["gpu_used"]) == ("Triton", None, 0.75)
    assert {row["key"] for row in state["engine_slots"]} == set(scene.slots)
    assert state["engine_slots"][0]["kv_used"] == pytest.approx(1 - 4_000 / 60_000)
    page = person("viewer").get(reverse("pool", args=["chat-70b"])).content.decode()
    assert "83.0" in page and "75.0" in page


def test_a_server_that_tells_nothing_and_an_agent_that_is_silent_are_dashes(scene, moment):
    say(scene.agents[0], moment, None)
    say(scene.agents[1], moment - timedelta(minutes=1), VLLM)
    state = topics.pool_state(readings.read(moment), scene.pool)
    assert [(row["running"], row["kv_used"], row["gpu_used"]) for row in state["engines"]] == [(None, None, None)] * 2
    assert state["engines"][1]["css"] == "stale"


def test_points_come_every_quarter_of_a_minute_and_stay_for_a_quarter_of_an_hour(moment):
    lines = engines.EngineLines()
    slots = [{"slot_id": 1, "running": 3, "running_batch": 0, "free_kv_tokens": 0, "total_kv_tokens": 0}]
    for second in range(1_200):
        at = moment + timedelta(seconds=second)
        batches = EngineLive("Triton", inferences=second * 4, executions=second)
        points = lines.take("p", [word(at, batches, slots=slots)], at)
    assert len(points) == 61 and points[-1]["batch"] == 4.0 and points[-1]["running"] == 3.0
    assert points[-1]["kv_pct"] is None and points[-1]["gpu_pct"] is None, "unknown is no zero"
    shown = engines.line_figures(points)
    assert shown["memory_figure"]["data"][0]["y"] == [None] * 61


def test_a_server_that_began_again_counts_no_batch_that_was_not(moment):
    lines = engines.EngineLines()
    for second, counts in ((0, (900, 300)), (15, (960, 320)), (30, (5, 5)), (45, (25, 10))):
        at = moment + timedelta(seconds=second)
        points = lines.take("p", [word(at, EngineLive("Triton", inferences=counts[0], executions=counts[1]))], at)
    assert [point["batch"] for point in points] == [None, 3.0, None, 4.0]


def test_a_publisher_that_starts_afresh_goes_on_with_the_lines_and_first_paint_has_them(scene, moment, frames_redis):
    say(scene.agents[0], moment, VLLM)
    Ticker(Publisher(frames_redis)).tick(moment)
    later = moment + timedelta(seconds=20)
    say(scene.agents[0], later, EngineLive("vLLM", running=9, kv_used=0.4))
    Ticker(Publisher(frames_redis)).tick(later)
    (points,) = engines.told_before(frames_redis, [LAST_PREFIX + "pool:chat-70b"])
    assert [point["kv_pct"] for point in points] == [83.0, 40.0]
    page = person("viewer").get(reverse("pool", args=["chat-70b"])).content.decode()
    assert "KV cache 40.0" in page
    long_after = later + timedelta(minutes=5)
    lines = engines.EngineLines()
    lines.resume("p", points, long_after)
    assert lines.take("p", [], long_after)[0]["at"] == long_after.isoformat(), "another time: the lines begin anew"
