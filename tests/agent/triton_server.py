"""A Triton server for tests, from its public protocol: health, model readiness, inference with JSON tensors, metrics.

Not Triton: it does not install here. It checks what Triton checks of a request (tensor names, datatypes, shapes against
data) and answers errors in Triton's form and with its statuses; its only model embeds a text as two numbers.
"""

from __future__ import annotations

import json
import math

from aiohttp import web

DATATYPES = ("BOOL", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES")


def vector(text: str) -> list[float]:
    return [float(len(text)), float(sum(text.encode()) % 1009)]


class TritonServer:
    """One server with one embeddings model; `answer` may replace what inference brings (status, body)."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.live = True
        self.loaded = True
        self.answer: tuple[int, dict] | None = None
        self.metrics = b""
        self.requests: list[tuple[str, dict]] = []
        self.port = 0

    async def __aenter__(self) -> TritonServer:
        app = web.Application(client_max_size=2**24)
        app.router.add_get("/v2/health/live", self._health)
        app.router.add_get("/v2/health/ready", self._health)
        app.router.add_get("/v2/models/{model}/ready", self._model_ready)
        app.router.add_post("/v2/models/{model}/infer", self._infer)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.live else 400)

    async def _model_ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.loaded and request.match_info["model"] == self.model else 400)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics, content_type="text/plain")

    async def _infer(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        body = json.loads(await request.read())
        self.requests.append((request.raw_path, body))
        if not self.loaded or name != self.model:
            return _error(404, f"Request for unknown model: '{name}' is not found")
        if self.answer is not None:
            return web.json_response(self.answer[1], status=self.answer[0])
        try:
            return web.json_response(self._run(body))
        except ValueError as error:
            return _error(400, str(error))

    def _run(self, body: dict) -> dict:
        if int(body.get("parameters", {}).get("priority", 0)) < 0:
            raise ValueError("priority must be a non-negative integer")
        (tensor,) = body["inputs"]
        if tensor["name"] != "TEXT":
            raise ValueError(f"unexpected inference input '{tensor['name']}' for model '{self.model}'")
        if tensor["datatype"] not in DATATYPES:
            raise ValueError(f"invalid datatype for input {tensor['name']}")
        if tensor["datatype"] != "BYTES":
            raise ValueError(f"inference input '{tensor['name']}' data-type is '{tensor['datatype']}', expects 'BYTES'")
        if math.prod(tensor["shape"]) != len(tensor["data"]):
            raise ValueError(f"unexpected shape for input '{tensor['name']}'")
        rows = [vector(text) for text in tensor["data"]]
        wanted = [output["name"] for output in body.get("outputs", [])] or ["EMBEDDING"]
        if wanted != ["EMBEDDING"]:
            raise ValueError(f"unexpected inference output '{wanted[0]}' for model '{self.model}'")
        output = {
            "name": "EMBEDDING",
            "datatype": "FP32",
            "shape": [len(rows), 2],
            "data": [value for row in rows for value in row],
        }
        return {"model_name": self.model, "model_version": "1", "id": body.get("id", ""), "outputs": [output]}


def _error(status: int, words: str) -> web.Response:
    return web.json_response({"error": words}, status=status)
