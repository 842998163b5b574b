"""What a request is expected to cost before it runs, and how that expectation learns.

Expected output, bias and bytes per token are exponentially weighted averages per tenant and class. They are statistics
and may be floats; what leaves here is whole tokens and microseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

BIAS_MIN: Final = 0.25
BIAS_MAX: Final = 4.0
DEFAULT_ALPHA: Final = 0.1
DEFAULT_TOKENS_PER_BYTE: Final = 0.25
TOKENS_PER_BYTE_MAX: Final = 1.0
"""A byte-level tokenizer makes at most one token of a byte."""


@dataclass(frozen=True, slots=True)
class WorkRates:
    """Amortised slot time per token of one model and shape: slot busy us / tokens at reference concurrency."""

    prefill_us_per_token: float
    decode_us_per_token: float
    base_us: int = 0


def rounded(value: float) -> int:
    """As `round`, for values of 0 and more: half to even. Compiled code has it without a call of the interpreter's."""
    whole = int(value)
    over = value - whole
    return whole + 1 if over > 0.5 or (over == 0.5 and whole % 2) else whole


def prompt_tokens_bound(serialised_bytes: int, template_allowance_tokens: int) -> int:
    """The most tokens a prompt can have: one per byte of the serialised messages, plus the template's own."""
    return serialised_bytes + template_allowance_tokens


class DemandEstimate:
    """What one tenant's requests of one class turn out to be, learnt from those that completed."""

    __slots__ = ("_output", "_output_known", "alpha", "bias", "tokens_per_byte")

    def __init__(
        self,
        *,
        expected_output: float | None = None,
        tokens_per_byte: float = DEFAULT_TOKENS_PER_BYTE,
        alpha: float = DEFAULT_ALPHA,
    ) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha must be in (0, 1], got {alpha}")
        self.alpha = alpha
        self.bias = 1.0
        self._output_known = expected_output is not None
        self._output = 0.0 if expected_output is None else expected_output
        self.tokens_per_byte = tokens_per_byte

    @property
    def expected_output(self) -> float | None:
        """Mean output of a request; None while nothing is known."""
        return self._output if self._output_known else None

    def output_tokens(self, max_output_tokens: int) -> int:
        """Expected output, never more than the request's limit; the limit itself while nothing is known."""
        if not self._output_known or not max_output_tokens:
            return max_output_tokens
        expected = rounded(self._output)
        if expected >= max_output_tokens:
            return max_output_tokens
        return expected if expected > 1 else 1

    def prompt_tokens(self, prompt_bytes: int) -> int:
        """Prompt tokens by the learnt ratio, where the backend's tokenizer did not answer in time."""
        return math.ceil(prompt_bytes * self.tokens_per_byte)

    def learn_output(self, output_tokens: int) -> None:
        """Take in the output of a completed request (one choice)."""
        if self._output_known:
            self._output += self.alpha * (output_tokens - self._output)
        else:
            self._output_known, self._output = True, float(output_tokens)

    def learn_gpu_us(self, estimated_gpu_us: int, actual_gpu_us: int) -> None:
        """Take in actual / estimate, the estimate without its bias; the average stays in [0.25, 4]."""
        if estimated_gpu_us <= 0 or actual_gpu_us < 0:
            return
        bias = self.bias
        bias += self.alpha * (actual_gpu_us / estimated_gpu_us - bias)
        self.bias = BIAS_MIN if bias < BIAS_MIN else BIAS_MAX if bias > BIAS_MAX else bias

    def learn_bytes(self, prompt_bytes: int, prompt_tokens: int) -> None:
        """Take in the tokens that the backend counted for a prompt of known bytes."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        ratio = prompt_tokens / prompt_bytes
        ratio = TOKENS_PER_BYTE_MAX if ratio > TOKENS_PER_BYTE_MAX else ratio
        self.tokens_per_byte += self.alpha * (ratio - self.tokens_per_byte)


def raw_gpu_us(rates: WorkRates, prompt_tokens: int, output_tokens: int) -> int:
    """Estimated GPU time before any bias: prompt x prefill + output x decode (+ a fixed part per request)."""
    work = prompt_tokens * rates.prefill_us_per_token + output_tokens * rates.decode_us_per_token
    return rates.base_us + rounded(work)
