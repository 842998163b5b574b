"""Prometheus text of one agent. Names follow OpenTelemetry's GenAI server metrics and vLLM's where they have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controlplane.agent.engine import Engine
from controlplane.agent.spool_store import SpoolStore
from controlplane.core.histogram import Histogram

QUANTILES = (0.5, 0.95, 0.99)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class _Page:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def family(self, name: str, kind: str, text: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> None:
        self.lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        self.lines += [f"{name}{_labels(labels)} {value:.10g}" for labels, value in samples]

    def quantiles(self, name: str, text: str, by_class: Mapping[str, Histogram]) -> None:
        """Quantiles of the last minute, upper edges of their buckets; nothing where there is no sample."""
        samples = [
            ({"class": slug, "quantile": f"{q:g}"}, edge / 1e6)
            for slug, histogram in by_class.items()
            for q in QUANTILES
            if (edge := histogram.quantile_us(q)) is not None
        ]
        self.family(name, "gauge", text, samples)


def render(engine: Engine, store: SpoolStore) -> bytes:
    """The /metrics page."""
    page = _Page()
    _requests(page, engine)
    _queues(page, engine)
    _slots(page, engine)
    _spool(page, store)
    return ("\n".join(page.lines) + "\n").encode()


def _requests(page: _Page, engine: Engine) -> None:
    page.family(
        "flexband_requests_ended_total",
        "counter",
        "Admitted requests by how they ended.",
        [({"outcome": outcome.value}, count) for outcome, count in engine.outcomes.items()],
    )
    page.family("flexband_requests_offered_total", "counter", "Requests with a known key.", [({}, engine.offered)])
    page.family(
        "flexband_requests_unknown_key_total",
        "counter",
        "Requests with a key that is not known, by its first characters.",
        [({"prefix": prefix}, count) for prefix, count in engine.desk.log.unknown_keys.items()],
    )
    page.family(
        "flexband_samples_dropped_total",
        "counter",
        "Explained decisions that no report had room for.",
        [({}, engine.desk.log.samples_dropped)],
    )


def _queues(page: _Page, engine: Engine) -> None:
    now_us = engine.clock.now_us()
    queues = {queue.spec.slug: queue for queue in engine.scheduler.classes}
    page.family(
        "flexband_num_requests_waiting",
        "gauge",
        "Requests in the queue.",
        [({"class": s}, q.queued) for s, q in queues.items()],
    )
    page.family(
        "flexband_num_requests_running",
        "gauge",
        "Requests that run.",
        [({"class": s}, q.running) for s, q in queues.items()],
    )
    waits, ttfts = {}, {}
    for slug in queues:
        figures = engine.figures.of_class(engine.class_id(slug), now_us)
        waits[slug], ttfts[slug] = figures.wait.snapshot(now_us), figures.ttft.snapshot(now_us)
    page.quantiles("flexband_request_queue_time_seconds", "Time in the queue, last 60 s.", waits)
    page.quantiles("gen_ai_server_time_to_first_token_seconds", "Time to first token, last 60 s.", ttfts)


def _slots(page: _Page, engine: Engine) -> None:
    page.family(
        "flexband_slot_busy_seconds_total",
        "counter",
        "Time in which something ran on the slot.",
        [({"slot": name}, slot.metered.meter.busy_us / 1e6) for name, slot in engine.slots.items()],
    )
    page.family(
        "flexband_slot_lent", "gauge", "1 while batch may start on a flex slot.",
        [({"slot": name}, float(slot.state == "lent")) for name, slot in engine.flex.slots.items()],
    )  # fmt: skip
    page.family("flexband_policy_revision", "gauge", "Revision in force.", [({}, engine.revision)])


def _spool(page: _Page, store: SpoolStore) -> None:
    page.family(
        "flexband_usage_records_total",
        "counter",
        "Usage records that the control plane has taken from this process.",
        [({}, store.records_accepted)],
    )
    page.family(
        "flexband_usage_records_unreported",
        "gauge",
        "Closed usage records that the control plane has not taken yet.",
        [({}, store.records_unreported)],
    )
    page.family("flexband_spool_bytes", "gauge", "Size of the spool.", [({}, store.size_bytes())])
    page.family("flexband_spool_reports_waiting", "gauge", "Reports not accepted.", [({}, store.unaccepted_reports)])
