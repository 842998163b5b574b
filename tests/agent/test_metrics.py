"""What a Prometheus scraper gets: from a real listener, read back by the client library's own parsers."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from controlplane.agent.gateway import HttpFront
from controlplane.agent.latency_totals import WAITING_MAX, LatencyTotals, Total
from controlplane.agent.prometheus_histograms import REQUEST_EDGES_S, classic_buckets, native_histogram
from controlplane.agent.routes import AdminRoutes
from controlplane.agent.spool_store import SpoolStore
from controlplane.core.histogram import Histogram, upper_edge_us
from controlplane.wire.report import FLAG_STREAMED
from tests.agent import worlds
from tests.agent.test_spool import row
from tests.agent.wire_client import WireClient, chat_body, post

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NATIVE = "application/openmetrics-text; version=2.0.0"
PROMETHEUS_3 = f"{OPENMETRICS};escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


async def scrape(agent, accept: str = "text/plain"):
    """The page with its content type, from an admin listener of its own."""
    store = SpoolStore(agent.state_dir / "spool")
    store.current = agent.spool
    front = HttpFront(AdminRoutes(agent.engine, store, control=None))
    client = await WireClient.connect(await front.listen("127.0.0.1", 0))
    answer = await client.ask(f"GET /metrics HTTP/1.1\r\nhost: a\r\naccept: {accept}\r\n\r\n".encode())
    await front.close(within_s=0)
    assert answer.status == 200
    return answer.body.decode(), answer.headers["content-type"]


def samples(families) -> dict[tuple[str, tuple], float]:
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


async def serve_some(agent) -> None:
    client = await WireClient.connect(agent.port)
    for stream in (True, True, False):
        answer = await client.ask(post(chat_body(stream=stream, max_tokens=8, ignore_eos=True)))
        assert answer.status == 200
    refused = await client.ask(post(chat_body(model="nothing-like-it")))
    unserved = await client.ask(post(chat_body(), headers='x-flexband-class: not"served\\here\r\n'))
    assert (refused.status, unserved.status) == (403, 403)


async def test_every_format_tells_the_same_requests(make_agent):
    agent = await make_agent()
    await serve_some(agent)
    text, kind = await scrape(agent)
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    plain = samples(parser.text_string_to_metric_families(text))
    for accept, version in ((OPENMETRICS, "1.0.0"), (NATIVE, "2.0.0"), (PROMETHEUS_3, "1.0.0")):
        body, kind = await scrape(agent, accept)
        assert kind.startswith(f"application/openmetrics-text; version={version}"), accept
        found = samples(openmetrics.text_string_to_metric_families(body))
        moving = ("flexband_spool", "flexband_slot", "flexband_recent")
        missing = {key for key, value in plain.items() if not key[0].startswith(moving) and found.get(key) != value}
        assert not missing
    chat = (("class", "chat"),)
    assert plain["gen_ai_server_request_duration_seconds_count", chat] == 3
    assert plain["gen_ai_server_time_to_first_token_seconds_count", chat] == 2, "streamed ones only"
    assert plain["gen_ai_server_time_per_output_token_seconds_count", chat] == 2
    assert plain["flexband_request_inference_time_seconds_count", chat] == 3
    assert plain["flexband_generation_tokens_total", chat] == 24
    assert plain["flexband_requests_ended_total", (("outcome", "completed"),)] == 3


async def test_refusals_are_counted_by_class_and_reason_and_never_by_what_a_client_wrote(make_agent):
    agent = await make_agent()
    await serve_some(agent)
    text, _ = await scrape(agent)
    plain = samples(parser.text_string_to_metric_families(text))
    refused = {key[1]: value for key, value in plain.items() if key[0] == "flexband_requests_refused_total"}
    assert refused == {
        (("class", "chat"), ("reason", "model_not_allowed")): 1,
        (("class", "other"), ("reason", "class_not_allowed")): 1,
    }
    assert "served" not in text and "acme" not in text, "neither free text nor tenants are labels"


async def test_counts_of_a_run_reconcile(make_agent):
    """Offered are refused, ended or still here; each that ended is in the histogram once, whatever its end."""
    agent = await make_agent(speed=1)
    await serve_some(agent)
    gone, here = await WireClient.connect(agent.port), await WireClient.connect(agent.port)
    for client in (gone, here):
        client.send(post(chat_body(stream=True, max_tokens=400, ignore_eos=True)))
    await agent.until(lambda: len(agent.engine.calls) == 2)
    gone.abort()
    await agent.until(lambda: len(agent.engine.calls) == 1)
    text, _ = await scrape(agent)
    plain = samples(parser.text_string_to_metric_families(text))

    def total(name: str) -> float:
        return sum(value for key, value in plain.items() if key[0] == name)

    ended = total("flexband_requests_ended_total")
    assert plain["flexband_requests_ended_total", (("outcome", "cancelled_by_client"),)] == 1
    assert total("flexband_requests_offered_total") == ended + total("flexband_requests_refused_total") + 1 == 7
    assert total("gen_ai_server_request_duration_seconds_count") == ended == 4
    assert total("gen_ai_server_time_to_first_token_seconds_count") <= ended
    here.abort()


async def test_native_histograms_have_what_the_agent_counted(make_agent):
    agent = await make_agent()
    await serve_some(agent)
    body, _ = await scrape(agent, NATIVE)
    families = {family.name: family for family in openmetrics.text_string_to_metric_families(body)}
    [native] = [
        sample.native_histogram
        for sample in families["gen_ai_server_request_duration_seconds"].samples
        if sample.native_histogram is not None
    ]
    total = agent.engine.latencies.by_class()[1].e2e
    assert native.count_value == total.histogram.count == 3
    assert native.sum_value == pytest.approx(total.sum_us / 1e6)
    assert native.schema == 4
    counts, held = [], 0
    for delta in native.pos_deltas:
        held += delta
        counts.append(held)
    assert sum(counts) + native.zero_count == 3


def upper_edges_s(native) -> dict[float, int]:
    """Upper edges of native buckets and their counts, by the data model of Prometheus."""
    found, index, count = {}, 0, 0
    deltas = iter(native.pos_deltas)
    for span in native.pos_spans:
        index += span.offset
        for _ in range(span.length):
            count += next(deltas)
            found[2 ** (index / 16)] = count
            index += 1
    return found


@pytest.mark.parametrize("us", [1, 7, 999, 12_345, 700_000, 1_000_000, 86_400_000_000])
def test_a_native_bucket_holds_its_sample_within_its_error(us):
    histogram = Histogram()
    histogram.record(us, 3)
    [(edge_s, count)] = upper_edges_s(native_histogram(histogram, us)).items()
    assert count == 3
    assert us / 1e6 / 1.0042 <= edge_s <= us / 1e6 * 1.0443


def test_native_gaps_and_neighbours():
    histogram = Histogram([(100, 5), (101, 2), (150, 7), (-1, 1), (-32_768, 4)])
    native = native_histogram(histogram, 0)
    assert native.zero_count == 4 and native.count_value == 19
    assert list(upper_edges_s(native).values()) == [1, 5, 2, 7]
    empty = native_histogram(Histogram(), 0)
    assert empty.pos_spans is None and empty.count_value == 0


def test_totals_have_the_buckets_of_the_core():
    """Around every edge up to a year, where the logarithm is exact, and far beyond the last."""
    edges = {upper_edge_us(index) for index in range(48 * 16)}
    samples = sorted({max(0, edge + off) for edge in edges for off in (-1, 0, 1)})
    samples = [us for us in samples if us < 2**45]
    total, histogram = Total(), Histogram()
    for us in samples:
        total.record(us)
        histogram.record(us)
    assert total.histogram == histogram and total.sum_us == sum(samples)
    total.record(2**60)
    assert total.histogram.count == len(samples) + 1


def test_classic_buckets_only_hold_what_certainly_fits():
    histogram = Histogram()
    for us in (0, 9_000, 10_000, 11_000, 200_000_000):
        histogram.record(us)
    buckets = dict(classic_buckets(histogram, REQUEST_EDGES_S))
    assert buckets["0.01"] == 2, "10,000 us shares a bucket with what is over the edge"
    assert buckets["0.02"] == 4
    assert buckets["81.92"] == 4 and buckets["+Inf"] == 5
    assert list(buckets.values()) == sorted(buckets.values())


def test_records_that_wait_to_be_counted_are_bounded():
    totals = LatencyTotals()
    streamed = msgspec.structs.replace(row("a"), slot_id=1, flags=FLAG_STREAMED, ttft_us=5, decode_us=90)
    for _ in range(3 * WAITING_MAX + 1):
        totals.note(streamed)
        assert len(totals._waiting) <= WAITING_MAX
    chat = totals.by_class()[1]
    assert chat.e2e.histogram.count == chat.tpot.histogram.count == 3 * WAITING_MAX + 1
    assert chat.output_tokens == 5 * (3 * WAITING_MAX + 1)
    never_ran = LatencyTotals()
    never_ran.note(row("b"))
    assert never_ran.by_class()[1].queue.histogram.count == 1
    assert not never_ran.by_class()[1].inference.histogram, "what never ran has no time at the backend"


async def test_a_class_that_a_revision_takes_away_leaves_the_series_of_others_alone(make_agent):
    agent = await make_agent()
    await serve_some(agent)
    agent.apply(
        worlds.document(2, classes=[worlds.class_policy("voice", id=8), worlds.class_policy("bulk", kind="batch")])
    )
    text, _ = await scrape(agent)
    plain = samples(parser.text_string_to_metric_families(text))
    assert plain["gen_ai_server_request_duration_seconds_count", (("class", "class-1"),)] == 3
    assert ("gen_ai_server_request_duration_seconds_count", (("class", "voice"),)) not in plain


async def test_no_gauge_is_overwritten_by_what_was_looked_at_last(make_agent):
    """Two classes and two slots in different states: each has a sample of its own, and none stands twice."""
    agent = await make_agent(worlds.document(pool={"slots": [worlds.slot(1), worlds.slot(2)]}), speed=0.5)
    client = await WireClient.connect(agent.port)
    assert (await client.ask(post(chat_body()))).status == 200
    client.send(post(chat_body(max_tokens=200, ignore_eos=True)))
    await agent.until(lambda: any(call.slot for call in agent.engine.calls.values()))
    text, _ = await scrape(agent)
    lines = [line.rsplit(" ", 1)[0] for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(set(lines)), "of a sample that stands twice the last one would win"
    found = samples(parser.text_string_to_metric_families(text))

    def of(metric: str, label: str) -> dict[str, float]:
        return {dict(labels)[label]: value for (name, labels), value in found.items() if name == metric}

    running, busy = of("flexband_num_requests_running", "class"), of("flexband_slot_busy_seconds_total", "slot")
    assert (running["chat"], sum(running.values())) == (1, 1)
    assert set(busy) == set(agent.engine.slots) and sorted(map(bool, busy.values())) == [False, True]
