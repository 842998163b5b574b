"""What is learnt of a request that completed, for the estimates of those after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.agent.backends.request import TokenUsage

if TYPE_CHECKING:
    from controlplane.agent.call import Call
    from controlplane.agent.tokenless_time import TokenlessTime


def learn(call: Call, usage: TokenUsage, gpu_us: int, tokenless_time: TokenlessTime) -> None:
    """Take in tokens and GPU time; where tokens were estimated, only the GPU time of work that has no output."""
    estimate = call.estimate
    if estimate is None or (usage.estimated and not call.one_shot):
        return
    estimate.learn_gpu_us(call.raw_gpu_us, gpu_us)
    if call.one_shot and call.tokenless:
        tokenless_time.learn(gpu_us)
        return
    if not usage.estimated:
        estimate.learn_bytes(call.prompt_bytes, usage.prompt_tokens)
    if not call.one_shot:
        estimate.learn_output(usage.output_tokens // call.n)
