"""The official client against a real agent."""

import asyncio
import time
from itertools import pairwise

import openai
import pytest

from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.core.reasons import Outcome
from tests.agent import transcripts, worlds
from tests.agent import upstreams as up
from tests.agent.upstreams import Upstream

MESSAGES = [{"role": "user", "content": "Say something about queues and how they drain."}]


def client(agent: worlds.Agent, key: str = worlds.SECRET, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url=agent.url, max_retries=0, timeout=60, **more)


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
        assert (await ai.models.retrieve(worlds.MODEL)).id == worlds.MODEL
        with pytest.raises(openai.NotFoundError) as other:
            await ai.models.retrieve("other")
    assert other.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("live", "code"),
    [({}, "invalid_api_key"), ({"state": "revoked"}, "key_revoked"), ({"expires_us": 1}, "key_expired")],
)
async def test_models_are_told_to_keys_in_force_only(make_agent, live, code):
    agent = await make_agent(None, [worlds.live_key(**live)])
    async with client(agent, key=worlds.SECRET if live else "nobody") as ai:
        with pytest.raises(openai.AuthenticationError) as refused:
            await ai.models.list()
    assert refused.value.code == code


@pytest.mark.parametrize("where", ["tenants", "classes"])
async def test_a_model_that_tenant_or_class_may_not_use_is_not_listed(make_agent, where):
    made = {"tenants": worlds.tenant_policy, "classes": worlds.class_policy}[where]
    agent = await make_agent(worlds.document(**{where: [made(models=["other"])]}))
    async with client(agent) as ai:
        assert [model.id async for model in ai.models.list()] == []


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


def engine_client(agent: worlds.Agent, *, retries: int = 0, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=worlds.SECRET, base_url=agent.url, max_retries=retries, timeout=60, **more)


async def in_front_of(make_agent, server: Upstream) -> worlds.Agent:
    return await make_agent(backend=OpenAIBackend(server.url))


async def test_tools_arrive_as_the_server_called_them(make_agent):
    """Streamed in pieces, two beside each other, and whole: the client puts together what the server sent."""
    form = next(form for form in transcripts.ALL if form.name == "tool_calls_with_content")
    call = b'{"id":"t9","type":"function","function":{"name":"tide_table","arguments":"{\\"port\\":\\"Husum\\"}"}}'
    whole = (
        b'{"id":"u1","choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant","content":null,'
        b'"tool_calls":[%b]}}],"usage":{"prompt_tokens":88,"completion_tokens":15}}' % call
    )

    async def script(_, body, writer):
        if body.get("stream"):
            up.begin(writer)
            up.chunk(writer, b"".join(form.events))
            up.end(writer)
        else:
            up.respond(writer, 200, whole)

    tools = [{"type": "function", "function": {"name": "tide_table", "parameters": {"type": "object"}}}]
    async with Upstream(script) as server:
        agent = await in_front_of(make_agent, server)
        async with engine_client(agent) as ai:
            asked = {"model": worlds.MODEL, "messages": MESSAGES, "max_tokens": 64, "tools": tools}
            answer = await ai.chat.completions.create(**asked)
            async with ai.chat.completions.stream(**asked) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
    (one,) = answer.choices[0].message.tool_calls
    assert (one.function.name, one.function.arguments) == ("tide_table", '{"port":"Husum"}')
    message = final.choices[0].message
    assert message.content == "Let me look"
    assert [(c.id, c.function.arguments) for c in message.tool_calls] == [
        ("t1", '{"port":"Husum"}'),
        ("t2", '{"port":"Emden"}'),
    ]
    assert server.bodies[0]["tools"] == tools
    assert [row.output_tokens for row in agent.closed_rows()] == [15, 41]
    agent.assert_nothing_held()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (401, openai.InternalServerError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
        (503, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_each_failure_of_the_server_is_the_clients_own_exception(make_agent, status, kind, stream):
    """A 401 of the server is about the agent: the client's key was good and it is not told otherwise."""
    words = b'{"error":{"message":"no","type":"t","code":"c","param":"p"}}'

    async def script(_, __, writer):
        up.respond(writer, status, words, b"retry-after: 1")

    async with Upstream(script) as server:
        agent = await in_front_of(make_agent, server)
        async with engine_client(agent) as ai:
            with pytest.raises(kind) as raised:
                await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES, stream=stream)
    own = status < 500 and status != 401
    assert raised.value.code == ("c" if own else "upstream_error")
    assert raised.value.response.headers["x-request-id"] == agent.closed_rows()[0].request_id
    agent.assert_nothing_held()


async def test_an_error_inside_a_stream_reaches_the_client_as_one(make_agent):
    form = next(form for form in transcripts.ALL if form.name == "error_inside")

    async def script(_, __, writer):
        up.begin(writer)
        up.chunk(writer, b"".join(form.events))
        up.end(writer)

    async with Upstream(script) as server:
        agent = await in_front_of(make_agent, server)
        async with engine_client(agent) as ai:
            stream = await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES, stream=True)
            words = []
            with pytest.raises(openai.APIError, match="ran out of memory"):
                async for chunk in stream:
                    words.append(chunk.choices[0].delta.content)
    assert words == ["", "Grüße", " aus"]
    (row,) = agent.closed_rows()
    assert (row.outcome, row.output_tokens) == (Outcome.UPSTREAM_ERROR.code, 2)


async def test_the_clients_own_retries_wait_as_long_as_the_server_said(make_agent):
    """Each try is a request of its own with its own record; only the last is charged."""
    instants: list[float] = []

    async def script(_, __, writer):
        instants.append(time.perf_counter())
        if len(instants) < 3:
            up.respond(writer, 429, b'{"error":{"message":"busy"}}', b"retry-after: 1")
        else:
            up.respond(writer, 200, up.WHOLE)

    async with Upstream(script) as server:
        agent = await in_front_of(make_agent, server)
        async with engine_client(agent, retries=2) as ai:
            answer = await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES)
    assert answer.usage.completion_tokens == 3
    waits_s = [later - earlier for earlier, later in pairwise(instants)]
    print(f"tries came {', '.join(f'{wait:.2f} s' for wait in waits_s)} apart; told 1 s")
    assert all(wait > 0.9 for wait in waits_s)
    rows = agent.closed_rows()
    assert [row.status for row in rows] == [429, 429, 200]
    assert len({row.request_id for row in rows}) == 3
    assert [row.charge_output_nanos for row in rows] == [0, 0, 9000]


async def test_refusals_that_waiting_does_not_heal_are_not_tried_again(make_agent):
    agent = await make_agent()
    async with engine_client(agent, retries=3) as ai:
        with pytest.raises(openai.BadRequestError):
            await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES, max_tokens=513)
        with pytest.raises(openai.BadRequestError):
            await ai.chat.completions.create(model=worlds.MODEL, messages=[])
    assert agent.engine.offered == 1, "one refusal each; what cannot be read is not offered"


async def test_a_task_that_is_cancelled_cancels_upstream(make_agent):
    """Whole and streamed: the server is told within a second, the record is closed."""

    async def script(_, body, writer):
        if body.get("stream"):
            up.begin(writer)
            up.chunk(writer, up.ROLE + up.word("a"))
        await asyncio.sleep(30)

    async with Upstream(script) as server:
        agent = await in_front_of(make_agent, server)
        for number, stream in enumerate((False, True), start=1):
            async with engine_client(agent) as ai:

                async def use(ai=ai, stream=stream):
                    answer = await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES, stream=stream)
                    async for _ in answer:
                        pass

                using = asyncio.create_task(use())
                await agent.until(lambda number=number: len(server.bodies) == number)
                await asyncio.sleep(0.05)
                using.cancel()
                cancelled_s = time.perf_counter()
                await agent.until(lambda number=number: server.gone == number, within_s=1.0)
                print(f"stream={stream}: upstream was told after {(time.perf_counter() - cancelled_s) * 1000:.1f} ms")
                await asyncio.gather(using, return_exceptions=True)
        assert [row.outcome for row in agent.closed_rows()] == [Outcome.CANCELLED_BY_CLIENT.code] * 2
        agent.assert_nothing_held()


async def test_a_client_that_gives_up_waiting_is_one_cancelled_request(make_agent):
    async def script(_, __, writer):
        await asyncio.sleep(30)

    async with Upstream(script) as server:
        agent = await in_front_of(make_agent, server)
        async with engine_client(agent).with_options(timeout=0.3) as ai:
            with pytest.raises(openai.APITimeoutError):
                await ai.chat.completions.create(model=worlds.MODEL, messages=MESSAGES)
        await agent.until(lambda: not agent.engine.calls and server.gone == 1, within_s=1.0)
        assert [row.outcome for row in agent.closed_rows()] == [Outcome.CANCELLED_BY_CLIENT.code]
