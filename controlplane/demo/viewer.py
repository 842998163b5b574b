"""One viewer of the live page: `python -m controlplane.demo.viewer PLAN.json` signs in, subscribes and counts frames.

It measures how old a frame is when it arrives: the instant the publisher wrote into it against this machine's clock.
"""

import asyncio
import signal
import sys
import time
from datetime import datetime
from pathlib import Path

import aiohttp
import msgspec

from controlplane.demo.plan import write_json

PAUSE_S = 1.0


class ViewerPlan(msgspec.Struct, frozen=True):
    address: str
    username: str
    password: str
    topics: list[str]
    result: str


class ViewerResult(msgspec.Struct):
    """Lags in milliseconds; None when no frame came."""

    frames: int = 0
    snapshots: int = 0
    gaps: int = 0
    lag_ms_p50: float | None = None
    lag_ms_p99: float | None = None


class Viewer:
    def __init__(self, plan: ViewerPlan, session: aiohttp.ClientSession) -> None:
        self.plan = plan
        self.session = session
        self.lags_ms: list[float] = []
        self.result = ViewerResult()
        self._last: dict[str, tuple[object, int]] = {}

    async def run(self) -> None:
        while True:
            try:
                await self._sign_in()
                await self._watch()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                sys.stderr.write(f"viewer: {type(error).__name__} {error}\n")
            await asyncio.sleep(PAUSE_S)

    async def _sign_in(self) -> None:
        page = f"{self.plan.address}/sign-in/"
        async with self.session.get(page) as answer:
            text = await answer.text()
        token = text.partition('name="csrfmiddlewaretoken" value="')[2].partition('"')[0]
        form = {"username": self.plan.username, "password": self.plan.password, "csrfmiddlewaretoken": token}
        async with self.session.post(page, data=form, headers={"referer": page}, allow_redirects=False) as answer:
            if answer.status != 302:
                raise aiohttp.ClientError(f"sign-in answered {answer.status}")

    async def _watch(self) -> None:
        address = self.plan.address.replace("http", "ws", 1) + "/ws/live/"
        async with self.session.ws_connect(address, origin=self.plan.address) as socket:
            await socket.send_json({"subscribe": self.plan.topics})
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                self._count(msgspec.json.decode(message.data))

    def _count(self, frame: dict[str, object]) -> None:
        if frame.get("type") not in ("snapshot", "delta"):
            return
        topic, epoch, seq = str(frame["topic"]), frame.get("epoch"), int(str(frame["seq"]))
        self.result.frames += 1
        self.result.snapshots += frame["type"] == "snapshot"
        known = self._last.get(topic)
        if frame["type"] == "delta" and known and (known[0] != epoch or seq > known[1] + 1):
            self.result.gaps += 1
        self._last[topic] = (epoch, seq)
        if frame["type"] == "delta":
            written = datetime.fromisoformat(str(frame["at"]))
            self.lags_ms.append(1_000 * (time.time() - written.timestamp()))

    def write(self) -> None:
        lags = sorted(self.lags_ms)
        if lags:
            self.result.lag_ms_p50 = round(lags[len(lags) // 2], 1)
            self.result.lag_ms_p99 = round(lags[min(len(lags) - 1, int(len(lags) * 0.99))], 1)
        write_json(Path(self.plan.result), self.result)


async def main(path: Path) -> None:
    plan = msgspec.json.decode(path.read_bytes(), type=ViewerPlan)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
        viewer = Viewer(plan, session)
        watching = asyncio.create_task(viewer.run())
        await stop.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        viewer.write()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
