"""Histograms of scale 4 over microseconds as Prometheus reads them: classic buckets in seconds, and native ones.

A classic bucket holds what certainly fits under its edge: a sample within 4.4 % under an edge may count in the next.
A native histogram of schema 4 has the same ratio between its edges, but counts seconds, and 10^6 is no whole number of
its steps: 318.905. Shifted by 319, every edge reads 0.41 % too low.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client.core import BucketSpan, HistogramMetricFamily, Metric, NativeHistogram

from controlplane.agent.latency_totals import Total
from controlplane.core.histogram import SCALE, ZERO_INDEX, Histogram

# Boundaries that OpenTelemetry's GenAI semantic conventions advise.
REQUEST_EDGES_S: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_EDGES_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TTFT_EDGES_S: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
STAGE_EDGES_S: Final = (
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0
)  # fmt: skip
INDEX_SHIFT: Final = 319 - 1
"""From a bucket's index over microseconds to one over seconds; Prometheus numbers a bucket by its upper edge."""


def family(name: str, text: str, edges_s: tuple[float, ...], by_class: Mapping[str, Total], *, native: bool) -> Metric:
    """A histogram family by class; `native` adds a native histogram beside the classic buckets of each class."""
    made = HistogramMetricFamily(name, text, labels=["class"])
    for slug, total in by_class.items():
        histogram = total.histogram
        made.add_metric([slug], classic_buckets(histogram, edges_s), total.sum_us / 1e6)
        if native:
            made.add_sample(name, {"class": slug}, 0.0, native_histogram=native_histogram(histogram, total.sum_us))
    return made


def classic_buckets(histogram: Histogram, edges_s: tuple[float, ...]) -> list[tuple[str, float]]:
    """Cumulative counts by upper edge in seconds."""
    edges = [(f"{edge_s:g}", float(histogram.count_at_most(round(edge_s * 1e6)))) for edge_s in edges_s]
    return [*edges, ("+Inf", float(histogram.count))]


def native_histogram(histogram: Histogram, sum_us: int) -> NativeHistogram:
    """Sparse buckets of schema 4 over seconds: spans of (gap, length), counts as differences."""
    counts = {index - INDEX_SHIFT: count for index, count in histogram.counts.items() if index != ZERO_INDEX}
    spans: list[BucketSpan] = []
    deltas: list[int] = []
    before_index, before_count = None, 0
    for index in sorted(counts):
        if before_index is not None and index == before_index + 1:
            spans[-1] = BucketSpan(spans[-1].offset, spans[-1].length + 1)
        else:
            spans.append(BucketSpan(index if before_index is None else index - before_index - 1, 1))
        deltas.append(counts[index] - before_count)
        before_index, before_count = index, counts[index]
    return NativeHistogram(
        count_value=histogram.count,
        sum_value=sum_us / 1e6,
        schema=SCALE,
        zero_threshold=0.0,
        zero_count=histogram.counts.get(ZERO_INDEX, 0),
        pos_spans=spans or None,
        pos_deltas=deltas or None,
    )
