"""What one-shot work is recorded with: prompt tokens only, or none at all where the work has no tokens."""

from __future__ import annotations

from controlplane.agent.backends.request import BackendRequest, TokenUsage
from controlplane.agent.backends.usage_reading import usage_of
from controlplane.agent.one_shot_body import EMBEDDINGS_PATH


def one_shot_usage(request: BackendRequest, body: bytes) -> TokenUsage:
    """The server's own count of prompt tokens, else the agent's, flagged; tensors have no tokens to be counted."""
    if request.path != EMBEDDINGS_PATH:
        return TokenUsage(0, 0, 0)
    usage = usage_of(body)
    if usage is None or usage.prompt_tokens is None:
        return TokenUsage(request.prompt_tokens, 0, 0, estimated=True)
    return TokenUsage(usage.prompt_tokens, min(usage.cached_tokens, usage.prompt_tokens), 0)
