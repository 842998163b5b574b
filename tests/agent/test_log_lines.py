"""What an agent logs when requests go well and wrong: never a key, a prompt or an answer."""

import json
import logging

from controlplane.agent.backends.openai import OpenAIBackend
from tests.agent import worlds
from tests.agent.upstreams import Upstream, begin, chunk, respond
from tests.agent.wire_client import WireClient, chat_body, post

PROMPT = "the patient's name is Zebedee"
WRONG_KEY = "fb_test_this-key-is-not-known"


async def ask(agent, **fields):
    client = await WireClient.connect(agent.port)
    return await client.ask(post(chat_body(messages=[{"role": "user", "content": PROMPT}], **fields)))


async def test_no_log_line_holds_a_key_a_prompt_or_an_answer(make_agent, caplog):
    caplog.set_level(logging.DEBUG)

    async def script(_, body, writer):
        said = json.dumps(body["messages"]).encode()
        if body["max_tokens"] == 1:
            respond(writer, 500, b'{"error":{"message":' + said + b"}}")
        elif body["max_tokens"] == 2:
            writer.write(said)
            writer.close()
        elif body["max_tokens"] == 3:
            begin(writer)
            chunk(writer, b"data: " + said)
            writer.transport.abort()
        else:
            respond(writer, 400, said)

    async with Upstream(script) as server:
        agent = await make_agent(backend=OpenAIBackend(server.url))
        statuses = [(await ask(agent, max_tokens=tokens, stream=tokens == 3)).status for tokens in (1, 2, 3, 4)]
        client = await WireClient.connect(agent.port)
        unknown = await client.ask(post(chat_body(), key=WRONG_KEY))
        unreadable = await client.ask(post(b'{"messages": "' + PROMPT.encode()))
        await agent.until(lambda: not agent.engine.calls)
    assert (statuses, unknown.status, unreadable.status) == ([502, 502, 502, 400], 401, 400)
    assert "failed: the inference server answered" in caplog.text, "failures are told"
    for secret in (worlds.SECRET, WRONG_KEY, PROMPT, "Zebedee"):
        assert secret not in caplog.text
