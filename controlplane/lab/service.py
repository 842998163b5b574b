"""How long a request holds its place: constants, or measured tables. No GPU is involved.

`parts(prompt, output, running)` gives whole microseconds to the first token and from there to the end, for a request
that starts as the `running`-th on its slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from controlplane.agent.backends.curves import ServiceCurve


class ServiceModel(Protocol):
    """What the simulator asks of a model server."""

    def parts(self, prompt: int, output: int, running: int) -> tuple[int, int]:
        """(us to the first token, us of the rest)"""

    def described(self) -> str:
        """One line for a report."""

    @property
    def prefill_stalls(self) -> bool:
        """Whether a prefill holds up the other prefills of its slot, and the decoding of what runs there."""


@dataclass(frozen=True, slots=True)
class Constants:
    """base + prompt x prompt_us to the first token, output x output_us after it, whatever runs beside it."""

    base_us: int
    prompt_us: int
    output_us: int

    @property
    def prefill_stalls(self) -> bool:
        return False

    def parts(self, prompt: int, output: int, running: int) -> tuple[int, int]:
        return self.base_us + prompt * self.prompt_us, output * self.output_us

    def described(self) -> str:
        return f"base_ms={self.base_us / 1000:g},prompt_us={self.prompt_us},output_us={self.output_us}"


@dataclass(frozen=True, slots=True)
class Tables:
    """A measured curve: prefill by prompt, a decode step by how many run on the slot when the request starts.

    As in engines with continuous batching without chunked prefill (Orca, OSDI 2022): prefills of a slot follow each
    other, and nothing is decoded there meanwhile.
    """

    curve: ServiceCurve
    _step_us: dict[int, int] = field(default_factory=dict, compare=False)

    @property
    def prefill_stalls(self) -> bool:
        return True

    def parts(self, prompt: int, output: int, running: int) -> tuple[int, int]:
        step_us = self._step_us.get(running)
        if step_us is None:
            step_us = self._step_us[running] = round(self.curve.decode_us(running))
        return _prefill_us(self.curve, prompt), output * step_us

    def described(self) -> str:
        return f"measured tables of {self.curve.name}: prefill by prompt, decode step by requests on the slot"


@lru_cache(maxsize=131_072)
def _prefill_us(curve: ServiceCurve, prompt: int) -> int:
    return round(curve.prefill_us(prompt))


def read_service(text: str) -> Constants:
    """`base_ms=50,prompt_us=125,output_us=30000`. Raises ValueError that says what is wrong."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in ("base_ms", "prompt_us", "output_us"):
            raise ValueError(f"{part!r} is none of base_ms=, prompt_us=, output_us=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise ValueError(f"{part!r} has no number") from None
    base_us, prompt_us, output_us = (
        found.get("base_ms", 0.0) * 1000, found.get("prompt_us", 0.0), found.get("output_us", 0.0),
    )  # fmt: skip
    if min(base_us, prompt_us, output_us) < 0 or not base_us + prompt_us + output_us > 0:
        raise ValueError("service times are 0 or more, and not all 0")
    if any(value != round(value) for value in (base_us, prompt_us, output_us)):
        raise ValueError("service times are whole microseconds")
    return Constants(round(base_us), round(prompt_us), round(output_us))
