"""The agent's process: options, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import uvloop

from controlplane.agent import collector
from controlplane.agent import identity as identities
from controlplane.agent.agent_process import AgentProcess
from controlplane.agent.errors import RETIRED_STATUS, AgentError, Retired, UsageError
from controlplane.agent.options import Options, parse
from controlplane.agent.threads import beside_requests

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def main(arguments: list[str]) -> int:
    """Run until a signal ends it; 0 after an orderly end, 1 with one clear line, 2 for options that cannot be used,
    RETIRED_STATUS where no new start is of use.
    """
    try:
        options = parse(arguments)
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    logging.getLogger("amqp").setLevel(logging.WARNING)
    collector.tune()
    try:
        with uvloop_runner() as runner:
            runner.run(_serve(options))
    except AgentError as error:
        sys.stderr.write(f"error: {error}\n")
        return RETIRED_STATUS if isinstance(error, Retired) else 1
    except OSError as error:
        sys.stderr.write(f"error: {error}: choose another --listen or --state-dir\n")
        return 1
    return 0


def uvloop_runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def _serve(options: Options) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(beside_requests())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    identity = identities.load(options.state_dir)
    process = AgentProcess(options, identity)
    serving = asyncio.create_task(process.serve())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not serving.done():
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await process.end(orderly=True)
        return
    await process.end(orderly=False)
    serving.result()
