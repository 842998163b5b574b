"""What goes to a backend with one attempt, and what comes back of it."""

from __future__ import annotations


class BackendRequest:
    """One attempt as it is sent to a backend.

    `body` is the client's own JSON; a backend that forwards it adds `max_output_tokens`, `include_usage` and
    `priority` and nothing else. `ignore_eos` asks for exactly the limit. `one_shot` work has one answer and no output
    tokens: `n` is how many inputs it has, and its body passes as it is. `traceparent` is empty unless it is traced.
    """

    __slots__ = (
        "body", "ignore_eos", "max_output_tokens", "model", "n", "one_shot", "path", "priority", "prompt_tokens",
        "request_id", "slot_id", "stream", "traceparent", "wants_usage",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        path: str,
        body: bytes,
        model: str,
        slot_id: int,
        stream: bool,
        wants_usage: bool,
        prompt_tokens: int,
        max_output_tokens: int,
        n: int,
        priority: int,
        ignore_eos: bool = False,
        one_shot: bool = False,
        traceparent: bytes = b"",
    ) -> None:
        self.request_id = request_id
        self.path = path
        self.body = body
        self.model = model
        self.slot_id = slot_id
        self.stream = stream
        self.wants_usage = wants_usage
        self.prompt_tokens = prompt_tokens
        self.max_output_tokens = max_output_tokens
        self.n = n
        self.priority = priority
        self.ignore_eos = ignore_eos
        self.one_shot = one_shot
        self.traceparent = traceparent

    def sent_as(self, path: str, body: bytes) -> BackendRequest:
        """The same attempt as another server takes it."""
        return BackendRequest(
            self.request_id,
            path,
            body,
            self.model,
            self.slot_id,
            self.stream,
            self.wants_usage,
            self.prompt_tokens,
            self.max_output_tokens,
            self.n,
            self.priority,
            self.ignore_eos,
            self.one_shot,
            self.traceparent,
        )


class TokenUsage:
    """Tokens as the backend counted them; `estimated` when the agent had to count chunks itself."""

    __slots__ = ("cached_tokens", "estimated", "output_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, cached_tokens: int, output_tokens: int, estimated: bool = False) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.output_tokens = output_tokens
        self.estimated = estimated


class Failure:
    """Why an attempt failed. `status` and `body` are the upstream's own answer where it gave one (4xx passes as it is).

    `retryable` says that nothing of it can have had an effect that a second attempt would double. `retry_after` is the
    value of the upstream's header of that name. `told`: the client has the upstream's own error inside its stream, and
    `body` is the rest of that stream.
    """

    __slots__ = ("body", "content_type", "detail", "retry_after", "retryable", "status", "told")

    def __init__(
        self,
        detail: str,
        retryable: bool,
        status: int = 502,
        body: bytes = b"",
        content_type: bytes = b"application/json",
        retry_after: bytes = b"",
        told: bool = False,
    ) -> None:
        self.detail = detail
        self.retryable = retryable
        self.status = status
        self.body = body
        self.content_type = content_type
        self.retry_after = retry_after
        self.told = told
