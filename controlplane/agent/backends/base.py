"""What the engine asks of a backend: start a request on a slot, tell what comes back, cancel promptly."""

from typing import Protocol

from msgspec import Struct

from controlplane.wire.policy import PolicyDocument


class BackendRequest(Struct):
    """One attempt as it is sent to a backend.

    `body` is the client's own JSON; a backend that forwards it adds `max_output_tokens`, `include_usage` and
    `priority` and nothing else. `ignore_eos` asks for exactly the limit. `traceparent` is empty unless it is traced.
    """

    request_id: str
    path: str
    body: bytes
    model: str
    slot_id: int
    stream: bool
    wants_usage: bool
    prompt_tokens: int
    max_output_tokens: int
    n: int
    priority: int
    ignore_eos: bool = False
    one_shot: bool = False
    """One answer and no output tokens: `n` is how many inputs it has, and its body passes as it is."""
    traceparent: bytes = b""


class TokenUsage(Struct, frozen=True, gc=False):
    """Tokens as the backend counted them; `estimated` when the agent had to count chunks itself."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    estimated: bool = False


class Failure(Struct, frozen=True):
    """Why an attempt failed. `status` and `body` are the upstream's own answer where it gave one (4xx passes as it is).

    `retryable` says that nothing of it can have had an effect that a second attempt would double. `retry_after` is the
    value of the upstream's header of that name. `told`: the client has the upstream's own error inside its stream, and
    `body` is the rest of that stream.
    """

    detail: str
    retryable: bool
    status: int = 502
    body: bytes = b""
    content_type: bytes = b"application/json"
    retry_after: bytes = b""
    told: bool = False


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
