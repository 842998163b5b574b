"""The official client against a real agent."""

import openai
import pytest

from tests.agent import worlds

MESSAGES = [{"role": "user", "content": "Say something about queues and how they drain."}]


def client(agent: worlds.Agent, key: str = worlds.SECRET, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=agent.url, max_retries=0, timeout=10, **more)


async def test_chat_whole(make_agent):
    agent = await make_agent()
    async with client(agent) as ai:
        raw = await ai.chat.completions.with_raw_response.create(model=worlds.MODEL, messages=MESSAGES, max_tokens=12)
        answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 12
    assert raw.headers["x-flexband-class"] == "chat"
    assert raw.headers["x-request-id"]
    (row,) = agent.closed_rows()
    assert row.request_id == raw.headers["x-request-id"]
    assert (row.outcome, row.status, row.output_tokens) == (1, 200, answer.usage.completion_tokens)
    assert row.prompt_tokens == answer.usage.prompt_tokens
    assert row.charge_prompt_nanos == row.prompt_tokens * 1000
    assert row.charge_output_nanos == row.output_tokens * 3000
    agent.assert_nothing_held()


@pytest.mark.parametrize("include_usage", [True, False])
async def test_chat_streamed(make_agent, include_usage):
    agent = await make_agent()
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    async with client(agent) as ai:
        stream = await ai.chat.completions.create(
            model=worlds.MODEL, messages=MESSAGES, max_tokens=9, stream=True, extra_body={"ignore_eos": True}, **options
        )
        chunks = [chunk async for chunk in stream]
    words = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert len(words) == 9
    assert chunks[0].choices[0].delta.role == "assistant"
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == include_usage
    await agent.until(lambda: not agent.engine.calls)
    (row,) = agent.closed_rows()
    assert row.output_tokens == 9
    assert row.ttft_us >= 0
    agent.assert_nothing_held()


async def test_text_completion_both_ways(make_agent):
    agent = await make_agent()
    async with client(agent) as ai:
        whole = await ai.completions.create(model=worlds.MODEL, prompt="Once upon a time", max_tokens=5)
        again = await ai.completions.create(model=worlds.MODEL, prompt="Once upon a time", max_tokens=5)
        stream = await ai.completions.create(model=worlds.MODEL, prompt="Once upon a time", max_tokens=5, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
    assert text
    assert whole.choices[0].text == again.choices[0].text, "seeded: the same request gets the same answer"
    agent.assert_nothing_held()


async def test_several_choices(make_agent):
    agent = await make_agent()
    async with client(agent) as ai:
        answer = await ai.chat.completions.create(
            model=worlds.MODEL, messages=MESSAGES, max_tokens=4, n=3, extra_body={"ignore_eos": True}
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 12


async def test_models(make_agent):
    agent = await make_agent()
    async with client(agent) as ai:
        assert [model.id async for model in ai.models.list()] == [worlds.MODEL]


async def test_refusals_have_the_openai_shape(make_agent):
    agent = await make_agent()
    async with client(agent, key="nobody") as ai:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES)
    assert unknown.value.code == "invalid_api_key"
    assert unknown.value.response.headers["x-should-retry"] == "false"
    async with client(agent) as ai:
        with pytest.raises(openai.PermissionDeniedError) as model:
            await ai.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError) as long:
            await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES, max_tokens=513)
        with pytest.raises(openai.PermissionDeniedError) as outside:
            await ai.chat.completions.create(
                model=worlds.MODEL, messages=MESSAGES, extra_headers={"x-flexband-class": "gold"}
            )
    assert (model.value.code, model.value.param) == ("model_not_allowed", "model")
    assert long.value.code == "context_length_exceeded"
    assert outside.value.code == "class_not_allowed"
    counts = {row.reason: row.count for row in agent.engine.desk.log.take_counts()}
    assert counts == {37: 1, 39: 1, 36: 1}
    samples = agent.engine.desk.log.take_samples()
    assert len(samples) == 3
    assert any(not check.held for check in samples[0].checks)
    agent.assert_nothing_held()
