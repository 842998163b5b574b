"""A proxy as one would write it first: Starlette in front, httpx behind. Runs in an environment of its own.

python benchmarks/agent_starlette.py PORT UPSTREAM
"""

import sys

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

PORT, UPSTREAM = int(sys.argv[1]), sys.argv[2]
client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=500), timeout=60)


async def forward(request):
    made = client.build_request(
        "POST",
        f"{UPSTREAM}/v1/chat/completions",
        content=await request.body(),
        headers={"content-type": "application/json"},
    )
    answer = await client.send(made, stream=True)
    if answer.headers["content-type"].startswith("text/event-stream"):

        async def pieces():
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        return StreamingResponse(pieces(), media_type="text/event-stream")
    body = await answer.aread()
    await answer.aclose()
    return Response(body, media_type="application/json")


if __name__ == "__main__":
    application = Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])
    uvicorn.run(
        application, host="127.0.0.1", port=PORT, loop="uvloop", http="httptools", access_log=False, log_level="warning"
    )
