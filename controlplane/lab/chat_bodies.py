"""Chat requests of about so many prompt tokens that ask for exactly so many output tokens."""

from __future__ import annotations

from typing import Final

from controlplane.lab.traces import TraceRequest

BYTES_PER_TOKEN: Final = 4
FILLER: Final = (
    "each part of the line keeps its own time and waits for none of the others while work goes on through it "
)


def chat(model: str, request: TraceRequest, *, stream: bool) -> dict[str, object]:
    """A chat completion with about that many prompt tokens that asks for exactly that many output tokens."""
    wanted = max(1, request.prompt_tokens) * BYTES_PER_TOKEN
    content = (FILLER * (wanted // len(FILLER) + 1))[:wanted]
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max(1, request.output_tokens),
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def batch_body(model: str, request: TraceRequest) -> dict[str, object]:
    """The same for a line of a batch file, where nothing is streamed."""
    body = chat(model, request, stream=False)
    del body["stream"]
    return body
