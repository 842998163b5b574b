"""Traces of real requests, as a collector gets them: one per request, complete, without a word of it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

import pytest

from controlplane.agent import otlp_export
from controlplane.agent.agent_process import make_tracer
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.errors import UsageError
from controlplane.agent.options import parse, traces_url
from controlplane.agent.otlp_export import OtlpSink
from controlplane.agent.request_ids import new_request_id
from controlplane.agent.tracing import WAITING_MAX, Parent, Tracer, parse_traceparent
from controlplane.wire.policy import Batching
from tests.agent import worlds
from tests.agent.collectors import Collector, Hanging, Pouring
from tests.agent.upstreams import DONE, ROLE, USAGE, Upstream, begin, chunk, respond, word
from tests.agent.wire_client import WireClient, chat_body, post

PROMPT = "the patient's name is Zebedee"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"traceparent: 00-{TRACE}-{SPAN}-01\r\n"
SERVER, CLIENT = 2, 3


def traced(agent, url: str, *, rate: float = 1.0, timeout_s: float = 2.0) -> Tracer:
    agent.engine.tracer = Tracer(OtlpSink(traces_url(url), agent="gpu-1", timeout_s=timeout_s), rate=rate)
    return agent.engine.tracer


async def ask(agent, *, headers: str = "", key: str = worlds.SECRET, **fields):
    client = await WireClient.connect(agent.port)
    body = chat_body(messages=[{"role": "user", "content": PROMPT}], **fields)
    return await client.ask(post(body, key=key, headers=headers))


async def spans_of(collector: Collector, tracer: Tracer):
    await asyncio.to_thread(tracer.close, 5.0)
    return collector.spans


async def test_a_streamed_request_is_one_trace_whose_stages_add_up(make_agent):
    agent = await make_agent(speed=20)
    with Collector() as collector:
        tracer = traced(agent, collector.url)
        answer = await ask(agent, stream=True, max_tokens=20, ignore_eos=True)
        spans = await spans_of(collector, tracer)
    assert collector.paths == ["/v1/traces"]
    root, *parts = spans
    [row] = agent.closed_rows()
    request_id = answer.headers["x-request-id"]
    assert root.trace_id == request_id.replace("-", "") and {span.trace_id for span in spans} == {root.trace_id}
    assert root.parent_id == "" and root.kind == SERVER and root.service == "flexband-agent"
    assert root.name == f"chat {worlds.MODEL}"
    names = ["preprocess", "admission", "queue", "return", "attempt 1", "preprocess", "prefill", "decode"]
    assert [span.name for span in parts] == names
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    attempt = parts[4]
    assert attempt.kind == CLIENT and attempt.attributes["flexband.slot"] == "S1"
    assert [by_id[span.parent_id].name for span in parts] == [root.name] * 5 + ["attempt 1"] * 3
    assert (root.start_us, root.end_us) == (row.arrived_us, row.ended_us)
    stages = {name: sum(span.us for span in parts if span.name == name) for name in set(names)}
    assert stages["admission"] == row.admission_us
    assert stages["queue"] == row.queue_us
    assert stages["preprocess"] == row.preprocess_us
    assert (stages["prefill"], stages["decode"]) == (row.prefill_us, row.decode_us)
    assert stages["return"] == row.return_us
    assert sum(us for name, us in stages.items() if name != "attempt 1") == root.us, "to the microsecond"
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.model"] == worlds.MODEL
    assert root.attributes["gen_ai.usage.output_tokens"] == 20 == row.output_tokens
    assert root.attributes["gen_ai.usage.input_tokens"] == row.prompt_tokens
    assert root.attributes["flexband.request_id"] == request_id
    assert root.attributes["flexband.outcome"] == "completed" and root.attributes["http.response.status_code"] == 200
    assert root.attributes["flexband.tenant"] == "acme" and root.attributes["flexband.class"] == "chat"


async def test_the_trace_of_the_client_goes_on_up_to_the_inference_server(make_agent):
    async def script(_, body, writer):
        begin(writer)
        for event in (ROLE, word("a"), USAGE, DONE):
            chunk(writer, event)
        writer.write(b"0\r\n\r\n")

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        with Collector() as collector:
            tracer = traced(agent, collector.url)
            assert (await ask(agent, stream=True, headers=PARENT)).status == 200
            spans = await spans_of(collector, tracer)
            agent.engine.tracer = None
            assert (await ask(agent, stream=True, headers=PARENT)).status == 200
    assert spans[0].trace_id == TRACE and spans[0].parent_id == SPAN
    [attempt] = [span for span in spans if span.name == "attempt 1"]
    assert f"traceparent: 00-{TRACE}-{attempt.span_id}-01\r\n" in server.heads[0]
    assert "traceparent" not in server.heads[1], "nothing is passed on while tracing is off"


async def test_every_attempt_has_its_span(make_agent):
    async def script(server, body, writer):
        if len(server.bodies) == 1:
            respond(writer, 503, b"{}")
        else:
            respond(writer, 200, b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}')

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        with Collector() as collector:
            tracer = traced(agent, collector.url)
            assert (await ask(agent)).status == 200
            root, *parts = await spans_of(collector, tracer)
    attempts = [span for span in parts if span.name.startswith("attempt")]
    assert [span.attributes["flexband.ended_by"] for span in attempts] == ["failed", "completed"]
    assert [span.failed for span in attempts] == [True, False]
    assert [span.name for span in parts].count("queue") == 2, "it waited again after the first"
    assert "upstream" in {span.name for span in parts}, "not streamed: prefill and decode are one stage"
    covered = sum(span.us for span in parts if span not in attempts)
    assert covered == root.us
    assert root.attributes["flexband.attempts"] == 2 and not root.failed


async def test_the_wait_for_a_batch_is_a_stage_of_the_attempt(make_agent):
    agent = await make_agent(worlds.document(pool={"batching": Batching(16, 40)}))
    with Collector() as collector:
        tracer = traced(agent, collector.url)
        client = await WireClient.connect(agent.port)
        body = json.dumps({"model": worlds.MODEL, "input": PROMPT}).encode()
        assert (await client.ask(post(body, path="/v1/embeddings"))).status == 200
        root, *parts = await spans_of(collector, tracer)
    [row] = agent.closed_rows()
    assert root.name == f"embeddings {worlds.MODEL}"
    [wait] = [span for span in parts if span.name == "batch_wait"]
    assert wait.us == row.batch_wait_us > 35_000
    assert sum(span.us for span in parts if span.kind != CLIENT) == root.us == row.ended_us - row.arrived_us
    assert not any(b"Zebedee" in body for body in collector.bodies)


async def test_refused_and_failed_requests_are_traced_without_what_the_client_wrote(make_agent):
    async def script(_, body, writer):
        respond(writer, 500, b'{"error": "' + PROMPT.encode() + b'"}')

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        with Collector() as collector:
            tracer = traced(agent, collector.url)
            assert (await ask(agent, model=PROMPT)).status == 403
            odd = f"x-flexband-class: {PROMPT}\r\nx-request-id: {PROMPT}\r\ntraceparent: {PROMPT}\r\n"
            assert (await ask(agent, headers=odd)).status == 403
            assert (await ask(agent, headers=odd.replace("class", "clans"))).status == 502
            roots = [span for span in await spans_of(collector, tracer) if span.kind == SERVER]
    outcomes = [span.attributes["flexband.outcome"] for span in roots]
    assert outcomes == ["model_not_allowed", "class_not_allowed", "upstream_error"]
    assert [span.attributes["http.response.status_code"] for span in roots] == [403, 403, 502]
    assert [span.failed for span in roots] == [False, False, True]
    assert roots[0].attributes["flexband.attempts"] == 0
    for secret in (PROMPT, "Zebedee", worlds.SECRET):
        assert not any(secret.encode() in body for body in collector.bodies)


async def test_a_collector_that_hangs_costs_requests_nothing(make_agent):
    agent = await make_agent()
    with Hanging() as hanging:
        tracer = traced(agent, hanging.url, timeout_s=0.5)
        client = await WireClient.connect(agent.port)
        slowest = 0.0
        for _ in range(200):
            began = time.perf_counter()
            assert (await client.ask(post(chat_body()))).status == 200
            slowest = max(slowest, time.perf_counter() - began)
        began = time.perf_counter()
        await asyncio.to_thread(tracer.close, 1.0)
        assert time.perf_counter() - began < 10, "an orderly end does not wait for it"
    print(f"slowest of 200 requests beside a collector that hangs: {slowest * 1000:.1f} ms")
    assert tracer.exported == 0
    agent.assert_nothing_held()


@pytest.mark.parametrize(("part", "every_s"), [(b"x" * 1_000_000, 0.0), (b"x", 0.1)], ids=["endless", "dripping"])
async def test_a_collector_that_does_not_stop_answering_is_left(make_agent, part, every_s):
    agent = await make_agent()
    with Pouring(part, every_s) as pouring:
        tracer = traced(agent, pouring.url)
        client = await WireClient.connect(agent.port)
        for count in range(1, 3):
            assert (await client.ask(post(chat_body()))).status == 200
            await agent.until(lambda count=count: tracer.exported == count)
        assert pouring.poured < 64 * 1024 * 1024, "what the sockets hold, not all that it would send"
        await asyncio.to_thread(tracer.close, 5.0)


async def test_a_collector_whose_head_drips_is_left_at_the_deadline(make_agent, monkeypatch):
    """Each byte comes in time for a reader's timeout; the next batch must not wait for all of them."""
    monkeypatch.setattr(otlp_export, "HEAD_WITHIN_S", 0.3)
    agent = await make_agent()
    with Pouring(b"x", 0.05, head=b"HTTP/1.1 200 OK\r\nx-long: ") as dripping:
        tracer = traced(agent, dripping.url, timeout_s=2.0)
        client = await WireClient.connect(agent.port)
        for count in range(1, 3):
            assert (await client.ask(post(chat_body()))).status == 200
            await agent.until(lambda count=count: tracer.failed == count, within_s=60.0)
        assert tracer.exported == 0
        await asyncio.to_thread(tracer.close, 5.0)


async def test_a_redirect_is_no_success(make_agent):
    agent = await make_agent()
    with Collector(status=302) as collector:
        tracer = traced(agent, collector.url)
        client = await WireClient.connect(agent.port)
        assert (await client.ask(post(chat_body()))).status == 200
        await agent.until(lambda: tracer.failed == 1)
        await asyncio.to_thread(tracer.close, 5.0)
    assert tracer.exported == 0


async def test_what_the_queue_has_no_room_for_is_counted(make_agent, monkeypatch):
    monkeypatch.setattr("controlplane.agent.tracing.WAITING_MAX", 5)
    agent = await make_agent()
    with Hanging() as hanging:
        tracer = traced(agent, hanging.url, timeout_s=30)
        monkeypatch.setattr("controlplane.agent.tracing.BATCH_MAX", 1)
        client = await WireClient.connect(agent.port)
        for _ in range(20):
            assert (await client.ask(post(chat_body()))).status == 200
        assert len(tracer._waiting) == 5
        assert tracer.dropped in (14, 15), "one may be under way"
        await asyncio.to_thread(tracer.close, 0.1)
    assert WAITING_MAX == 2_048


async def test_a_collector_that_refuses_is_told_of_once_and_counted(make_agent, caplog):
    agent = await make_agent()
    with Collector(status=400) as collector:
        tracer = traced(agent, collector.url)
        client = await WireClient.connect(agent.port)
        for count in range(1, 4):
            assert (await client.ask(post(chat_body()))).status == 200
            await agent.until(lambda count=count: tracer.failed == count)
        await asyncio.to_thread(tracer.close, 5.0)
    assert (tracer.exported, tracer.failed) == (0, 3)
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert "does not take traces" in caplog.text


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (f"00-{TRACE}-{SPAN}-01", Parent(int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-00", Parent(int(TRACE, 16), int(SPAN, 16), False)),
        (f"  cc-{TRACE}-{SPAN}-03-later-fields ", Parent(int(TRACE, 16), int(SPAN, 16), True)),
        (f"00-{TRACE}-{SPAN}-01-more", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{SPAN}-01", None),
        (f"00-{TRACE[:-1]}-{SPAN}-01", None),
        ("", None),
        ("\xff\x00", None),
    ],
)
def test_traceparent_is_read_as_the_standard_says(header, parent):
    assert parse_traceparent(header.encode("latin-1")) == parent


class Nowhere:
    """A sink for tests of sampling."""

    def export(self, ended):
        return True

    def shutdown(self):
        return None


def test_the_rate_bounds_what_is_traced_and_a_client_can_say_no():
    tracers = {rate: Tracer(Nowhere(), rate=rate) for rate in (0.0, 0.25, 1.0)}
    ids = [new_request_id(1_800_000_000_000_000 + n) for n in range(4_000)]
    share = {rate: sum(t.begin(i, b"") is not None for i in ids) / len(ids) for rate, t in tracers.items()}
    assert share[0.0] == 0 and share[1.0] == 1
    assert 0.2 < share[0.25] < 0.3
    assert tracers[1.0].begin(ids[0], f"00-{TRACE}-{SPAN}-00".encode()) is None
    assert tracers[0.0].begin(ids[0], f"00-{TRACE}-{SPAN}-01".encode()) is None, "a client cannot force it"
    for tracer in tracers.values():
        tracer.close(1.0)


def test_options_and_a_missing_extra_have_one_clear_line(tmp_path, monkeypatch):
    base = ["--control-plane", "http://127.0.0.1:9", "--name", "gpu-1", "--state-dir", str(tmp_path)]
    assert make_tracer(parse(base)) is None
    options = parse([*base, "--otlp-endpoint", "http://127.0.0.1:4318", "--otlp-sample", "0.1"])
    assert options.otlp_endpoint == "http://127.0.0.1:4318/v1/traces"
    assert parse([*base, "--otlp-endpoint", "https://a.example/x/y"]).otlp_endpoint == "https://a.example/x/y"
    for wrong in (["--otlp-endpoint", "collector:4318"], ["--otlp-endpoint", "http://a", "--otlp-sample", "2"]):
        with pytest.raises(UsageError, match="--otlp-"):
            parse([*base, *wrong])
    monkeypatch.delitem(sys.modules, "controlplane.agent.otlp_export")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UsageError, match=r"requirements/tracing\.txt"):
        make_tracer(options)
