"""Service-time curves of the simulated backend: a few measured facts with straight lines between them.

The numbers are medians of the profiling runs of Llama-2-70B at tensor parallelism 8 that come with splitwise-sim
(github.com/Mutinifni/splitwise-sim, data/perf_model.csv, MIT licence; Patel et al., "Splitwise: Efficient
Generative LLM Inference Using Phase Splitting", ISCA 2024), rounded to a tenth of a millisecond: prefill by prompt
tokens, and one decode step by number of requests in the batch. Sub-monotone noise of short prompts is smoothed.
"""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceCurve:
    """`prefill_ms` by prompt tokens and `decode_ms` of one step by batch size, ascending in both columns."""

    name: str
    prefill_ms: tuple[tuple[int, float], ...]
    decode_ms: tuple[tuple[int, float], ...]

    def prefill_us(self, prompt_tokens: int) -> float:
        """Time to the first token of that many prompt tokens processed together."""
        return 1000.0 * interpolate(self.prefill_ms, prompt_tokens)

    def decode_us(self, running: int) -> float:
        """Time of one decode step in which each of `running` requests gets a token."""
        return 1000.0 * interpolate(self.decode_ms, running)


def interpolate(points: tuple[tuple[int, float], ...], x: int) -> float:
    """Linear between points, the first value below them, the last segment's slope beyond them."""
    if x <= points[0][0]:
        return points[0][1]
    at = min(bisect_left(points, (x, 0.0)), len(points) - 1)
    (low, low_value), (high, high_value) = points[at - 1], points[at]
    return low_value + (high_value - low_value) * (x - low) / (high - low)


H100 = ServiceCurve(
    name="h100",
    prefill_ms=((128, 51.7), (512, 53.4), (1024, 77.9), (2048, 136.8), (4096, 390.3), (8192, 844.9)),
    decode_ms=((1, 29.8), (2, 30.3), (4, 31.8), (8, 32.5), (16, 34.2), (32, 38.6), (64, 50.2)),
)
A100 = ServiceCurve(
    name="a100",
    prefill_ms=((128, 65.3), (256, 66.8), (512, 94.3), (1024, 154.5), (2048, 274.2), (4096, 661.2), (8192, 1549.8)),
    decode_ms=((1, 44.6), (4, 45.8), (8, 46.5), (16, 50.4), (32, 53.0), (64, 71.6)),
)
CURVES = {curve.name: curve for curve in (H100, A100)}
