"""Metrics of one agent for Prometheus, named as OpenTelemetry's GenAI server metrics and vLLM's are.

Everything is read when it is asked for. The scraper's `Accept` chooses the format: Prometheus text, OpenMetrics text,
or OpenMetrics 2.0, whose histograms are native too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from controlplane.agent.agent_slot import READY
from controlplane.agent.engine import Engine
from controlplane.agent.latency_totals import ClassTotals, Total
from controlplane.agent.prometheus_histograms import REQUEST_EDGES_S, STAGE_EDGES_S, TOKEN_EDGES_S, TTFT_EDGES_S, family
from controlplane.agent.spool_store import SpoolStore
from controlplane.core.histogram import Histogram

QUANTILES: Final = (0.5, 0.95, 0.99)
OTHER_CLASS: Final = "other"
"""Label of classes that the policy in force does not have; keeps what clients write out of the labels."""

Samples = Iterable[tuple[Mapping[str, str], float]]


def render(engine: Engine, store: SpoolStore, accept: str = "") -> tuple[bytes, bytes]:
    """The /metrics page and its content type."""
    encode, content_type = choose_encoder(accept)
    native = "openmetrics" in content_type and "version=2" in content_type
    return encode(_Page(engine, store, native=native)), content_type.encode()


class _Page:
    """A collector of everything, made for one scrape."""

    def __init__(self, engine: Engine, store: SpoolStore, *, native: bool) -> None:
        self._engine = engine
        self._store = store
        self._native = native

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        yield from _requests(engine)
        yield from _latencies(engine, native=self._native)
        yield from _queues(engine)
        yield from _items(engine)
        yield from _slots(engine)
        yield from _server(engine)
        yield from _spool(self._store)
        yield from _clock(engine)
        yield from _traces(engine)


def counter(name: str, text: str, samples: Samples) -> Metric:
    """A counter family; the name ends in `_total`."""
    made = CounterMetricFamily(name, text)
    for labels, value in samples:
        made.add_sample(name, dict(labels), value)
    return made


def gauge(name: str, text: str, samples: Samples) -> Metric:
    """A gauge family."""
    made = GaugeMetricFamily(name, text)
    for labels, value in samples:
        made.add_sample(name, dict(labels), value)
    return made


def quantiles(name: str, text: str, by_class: Mapping[str, Histogram]) -> Metric:
    """Quantiles of the last minute, upper edges of their buckets; nothing where there is no sample."""
    return gauge(
        name,
        text,
        [
            ({"class": slug, "quantile": f"{q:g}"}, edge / 1e6)
            for slug, histogram in by_class.items()
            for q in QUANTILES
            if (edge := histogram.quantile_us(q)) is not None
        ],
    )


def _requests(engine: Engine) -> Iterator[Metric]:
    log = engine.desk.log
    yield counter(
        "flexband_requests_ended_total",
        "Admitted requests by how they ended.",
        [({"outcome": outcome.value}, count) for outcome, count in engine.outcomes.items()],
    )
    yield counter("flexband_requests_offered_total", "Requests with a known key.", [({}, engine.offered)])
    refused: dict[tuple[str, str], int] = {}
    names = _class_names(engine)
    for (class_id, reason), count in log.refused.items():
        place = names.get(class_id, OTHER_CLASS), reason.value
        refused[place] = refused.get(place, 0) + count
    yield counter(
        "flexband_requests_refused_total",
        "Requests that admission refused, by class and reason.",
        [({"class": slug, "reason": reason}, count) for (slug, reason), count in refused.items()],
    )
    yield counter(
        "flexband_requests_unknown_key_total",
        "Requests with a key that is not known, by its first characters.",
        [({"prefix": prefix}, count) for prefix, count in log.unknown_keys.items()],
    )
    yield counter(
        "flexband_outage_requests_total",
        "Requests with a hard budget while neither the control plane nor a lease was there.",
        [({"decision": decision}, count) for decision, count in engine.desk.outage.totals.items()],
    )
    yield counter(
        "flexband_samples_dropped_total",
        "Explained decisions that no report had room for.",
        [({}, log.samples_dropped)],
    )


def _class_names(engine: Engine) -> dict[int, str]:
    return {entry.policy.id: slug for slug, entry in engine.registry.classes.items()}


class Times(NamedTuple):
    """A histogram by class: its family, the edges of its buckets in seconds, and which total it shows.

    It is made of the totals of each class when it is asked for.
    """

    name: str
    text: str
    edges_s: tuple[float, ...]
    of: Callable[[ClassTotals], Total]


_TIMES: Final = (
    Times(
        "gen_ai_server_request_duration_seconds",
        "From a request's last byte in to its answer's last byte out.",
        REQUEST_EDGES_S,
        lambda totals: totals.e2e,
    ),
    Times(
        "gen_ai_server_time_to_first_token_seconds",
        "From a request's last byte in to the first token handed out; streamed requests only.",
        TTFT_EDGES_S,
        lambda totals: totals.ttft,
    ),
    Times(
        "gen_ai_server_time_per_output_token_seconds",
        "Mean time per output token after the first one of a request; streamed requests only.",
        TOKEN_EDGES_S,
        lambda totals: totals.tpot,
    ),
    Times(
        "flexband_request_admission_time_seconds",
        "Time that the decision took, with waiting for a lease.",
        STAGE_EDGES_S,
        lambda totals: totals.admission,
    ),
    Times(
        "flexband_request_queue_time_seconds",
        "Time in the queue.",
        STAGE_EDGES_S,
        lambda totals: totals.queue,
    ),
    Times(
        "flexband_request_batch_wait_time_seconds",
        "Time on a slot until the request's batch closed; one-shot requests that were gathered.",
        STAGE_EDGES_S,
        lambda totals: totals.batch_wait,
    ),
    Times(
        "flexband_request_inference_time_seconds",
        "Time at the backend, prefill and decode.",
        REQUEST_EDGES_S,
        lambda totals: totals.inference,
    ),
    Times(
        "flexband_request_prefill_time_seconds",
        "Time from prefill's start to the first token; streamed requests only.",
        STAGE_EDGES_S,
        lambda totals: totals.prefill,
    ),
    Times(
        "flexband_request_decode_time_seconds",
        "Time from the first token to the last; streamed requests only.",
        REQUEST_EDGES_S,
        lambda totals: totals.decode,
    ),
)


def _latencies(engine: Engine, *, native: bool) -> Iterator[Metric]:
    names = _class_names(engine)
    # A class that is gone keeps its number as its name, so that no series of another one jumps.
    by_class = {names.get(id_, f"class-{id_}"): totals for id_, totals in engine.latencies.by_class().items()}
    for times in _TIMES:
        totals = {slug: times.of(totals) for slug, totals in by_class.items()}
        yield family(times.name, times.text, times.edges_s, totals, native=native)
    yield from _tokens(by_class)


def _tokens(by_class: Mapping[str, ClassTotals]) -> Iterator[Metric]:
    yield counter(
        "flexband_prompt_tokens_total",
        "Prompt tokens of ended requests, cached ones among them.",
        [({"class": slug}, totals.prompt_tokens) for slug, totals in by_class.items()],
    )
    yield counter(
        "flexband_cached_tokens_total",
        "Prompt tokens of ended requests that the backend had in its cache.",
        [({"class": slug}, totals.cached_tokens) for slug, totals in by_class.items()],
    )
    yield counter(
        "flexband_generation_tokens_total",
        "Output tokens of ended requests.",
        [({"class": slug}, totals.output_tokens) for slug, totals in by_class.items()],
    )


def _queues(engine: Engine) -> Iterator[Metric]:
    now_us = engine.clock.now_us()
    queues = {queue.spec.slug: queue for queue in engine.scheduler.classes}
    yield gauge(
        "flexband_num_requests_waiting",
        "Requests in the queue.",
        [({"class": slug}, queue.queued) for slug, queue in queues.items()],
    )
    yield gauge(
        "flexband_num_requests_running",
        "Requests that run.",
        [({"class": slug}, queue.running) for slug, queue in queues.items()],
    )
    waits, ttfts = {}, {}
    for slug in queues:
        figures = engine.figures.of_class(engine.registry.class_id(slug), now_us)
        waits[slug], ttfts[slug] = figures.wait.snapshot(now_us), figures.ttft.snapshot(now_us)
    yield quantiles("flexband_recent_queue_time_seconds", "Time in the queue, last 60 s.", waits)
    yield quantiles("flexband_recent_time_to_first_token_seconds", "Time to first token, last 60 s.", ttfts)


def _items(engine: Engine) -> Iterator[Metric]:
    """Batch items that are leased to this agent."""
    names, items = _class_names(engine), engine.items
    yield gauge(
        "flexband_items_held",
        "Batch items leased to this agent, by where they are.",
        [
            ({"class": names.get(class_id, f"class-{class_id}"), "phase": phase.value}, count)
            for (class_id, phase), count in items.counts().items()
        ],
    )
    yield counter(
        "flexband_items_ended_total",
        "Batch items by how their lease ended here; cancelled_by_drain is handed back unrun.",
        [
            ({"class": names.get(class_id, f"class-{class_id}"), "outcome": outcome.value}, count)
            for (class_id, outcome), count in items.done.items()
        ],
    )
    yield counter("flexband_items_lapsed_total", "Items whose lease ended before they began.", [({}, items.lapsed)])


def _slots(engine: Engine) -> Iterator[Metric]:
    yield counter(
        "flexband_slot_busy_seconds_total",
        "Time in which something ran on the slot.",
        [({"slot": name}, slot.metered.meter.busy_us / 1e6) for name, slot in engine.slots.items()],
    )
    yield gauge(
        "flexband_slot_lent",
        "1 while batch may start on a flex slot.",
        [({"slot": name}, float(slot.state == "lent")) for name, slot in engine.flex.slots.items()],
    )
    yield gauge("flexband_policy_revision", "Revision in force.", [({}, engine.revision)])


def _server(engine: Engine) -> Iterator[Metric]:
    """The inference server's own figures; a figure that is unknown, or older than 6 s, has no sample."""
    watch = engine.readiness.watch
    if watch is None:
        return
    reading, totals = watch.reading, watch.totals
    yield gauge(
        "flexband_slots_ready",
        "1 while the inference server takes work, so that slots do; absent without --upstream.",
        [({}, float(engine.readiness.state == READY))],
    )
    yield gauge(
        "flexband_server_requests",
        "Requests that the inference server itself counts, by phase.",
        _known({"phase": "running"}, reading.running) + _known({"phase": "waiting"}, reading.waiting),
    )
    yield gauge(
        "flexband_server_kv_used_ratio",
        "Share of the KV cache in use, of the fullest engine.",
        _known({}, reading.kv_used),
    )
    yield counter(
        "flexband_server_tokens_total",
        "Tokens that the inference server has counted while it was watched, across its restarts.",
        [
            sample
            for name, count in totals.counted.items()
            for sample in _known({"kind": name.removesuffix("_tokens")}, count)
        ],
    )
    yield counter(
        "flexband_server_batched_total",
        "Inferences and the executions that ran them, of a server that batches by itself.",
        [sample for kind, count in watch.batched.items() for sample in _known({"kind": kind}, count)],
    )
    yield counter("flexband_server_restarts_total", "Restarts seen in its figures.", [({}, totals.restarts)])
    yield counter(
        "flexband_server_scrapes_failed_total",
        "Looks at its metrics page that brought nothing, by reason.",
        [({"reason": reason}, count) for reason, count in watch.failed.items()],
    )
    yield gauge(
        "flexband_server_gpu_memory_bytes",
        "Memory of the inference server's GPUs, as it or DCGM tells: used, and all there is.",
        _known({"kind": "used"}, reading.gpu_used_bytes) + _known({"kind": "total"}, reading.gpu_total_bytes),
    )
    if watch.gpus is not None:
        yield counter(
            "flexband_gpu_scrapes_failed_total",
            "Looks at the page of DCGM's exporter that brought nothing, by reason.",
            [({"reason": reason}, count) for reason, count in watch.gpus.failed.items()],
        )


def _known(labels: Mapping[str, str], value: float | None) -> list[tuple[Mapping[str, str], float]]:
    return [] if value is None else [(labels, value)]


def _spool(store: SpoolStore) -> Iterator[Metric]:
    yield counter(
        "flexband_usage_records_total",
        "Usage records that the control plane has taken from this process.",
        [({}, store.records_accepted)],
    )
    yield gauge(
        "flexband_usage_records_unreported",
        "Closed usage records that the control plane has not taken yet.",
        [({}, store.records_unreported)],
    )
    yield gauge("flexband_spool_bytes", "Size of the spool.", [({}, store.size_bytes())])
    yield gauge("flexband_spool_reports_waiting", "Reports not accepted.", [({}, store.unaccepted_reports)])
    yield counter(
        "flexband_reports_dropped_total",
        "Reports that went for want of space before they were accepted.",
        [({}, store.reports_dropped)],
    )


def _clock(engine: Engine) -> Iterator[Metric]:
    reading = engine.clock.offset.reading()
    yield gauge(
        "flexband_clock_offset_seconds",
        "This machine's clock minus the control plane's; absent while it is not known.",
        [] if reading is None else [({}, reading.offset_us / 1e6)],
    )


def _traces(engine: Engine) -> Iterator[Metric]:
    tracer = engine.tracer
    lost = {} if tracer is None else {"queue_full": tracer.dropped, "not_taken": tracer.failed}
    yield counter(
        "flexband_traces_exported_total",
        "Traces that the collector has taken; absent while tracing is off.",
        [] if tracer is None else [({}, tracer.exported)],
    )
    yield counter(
        "flexband_traces_dropped_total",
        "Traces that were lost, by cause; absent while tracing is off.",
        [({"cause": cause}, count) for cause, count in lost.items()],
    )
