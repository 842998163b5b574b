"""What the engine asks of a backend: start a request on a slot, tell what comes back, cancel promptly."""

from typing import Protocol

from controlplane.agent.backends.request import BackendRequest, Failure, TokenUsage
from controlplane.wire.policy import PolicyDocument


class Sink(Protocol):
    """Where a backend tells an attempt's progress; nothing is told after `cancel`, `finished` or `failed`."""

    def batch_closed(self) -> None:
        """The attempt waited for others to run with (`batching`) and waits no more."""

    def prefill_began(self) -> None:
        """The prompt is being worked on."""

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        """Bytes of a stream, unchanged, holding whole events; `tokens` 0 when they carry no output.

        `framed`: they are whole chunks as HTTP/1.1 frames them, and never the first bytes of a stream.
        """

    def finished(self, usage: TokenUsage, body: bytes) -> None:
        """The attempt ended well; `body` is the whole answer of a request that is not streamed."""

    def failed(self, failure: Failure) -> None:
        """The attempt ended badly."""


class Run(Protocol):
    """A running attempt."""

    def cancel(self) -> None:
        """Stop now; the sink hears nothing more."""

    def pause(self) -> None:
        """The client reads slower than bytes come."""

    def resume(self) -> None:
        """The client reads again."""

    def usage_so_far(self) -> TokenUsage | None:
        """What the server itself has counted up to now, for a request that ends early; None where it told nothing."""


class Backend(Protocol):
    """An inference server, or the simulation of one. Everything runs on the agent's event loop."""

    cancels_promptly: bool
    batches_itself: bool
    """The server gathers one-shot requests by its own rules, so they do not wait for each other before it."""

    async def open(self) -> None:
        """Make it ready. Raises AgentError when it cannot be."""

    async def close(self) -> None:
        """End everything."""

    def set_slots(self, slots: dict[int, int]) -> None:
        """The slots of this agent and the KV tokens of each."""

    def take_policy(self, document: PolicyDocument) -> None:
        """A revision came into force."""

    def start(self, request: BackendRequest, sink: Sink) -> Run:
        """Begin an attempt; from within this call the sink hears of `prefill_began` at most."""

    def count_prompt(self, serialised: bytes) -> int | None:
        """Tokens of a serialised prompt by the backend's own tokenizer, None where it does not answer at once."""
