"""All parts of one agent put together, from start to orderly end."""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import logging
import os
from typing import Final

from controlplane.agent import estimate_file
from controlplane.agent.backends.base import Backend
from controlplane.agent.backends.curves import CURVES
from controlplane.agent.backends.openai import OpenAIBackend
from controlplane.agent.backends.sim import SimBackend
from controlplane.agent.backends.triton import TritonBackend, TritonOptions
from controlplane.agent.backends.triton_watch import TritonWatch, metrics_url
from controlplane.agent.client import ControlPlane
from controlplane.agent.clock import Clock
from controlplane.agent.control import Control
from controlplane.agent.engine import Engine
from controlplane.agent.engine_watch import EngineWatch
from controlplane.agent.errors import AgentError, UsageError
from controlplane.agent.gateway import HttpFront
from controlplane.agent.gpu_watch import GpuWatch
from controlplane.agent.identity import Identity
from controlplane.agent.nudges import NudgeListener
from controlplane.agent.open_files import clients_max, raise_limit
from controlplane.agent.options import Options
from controlplane.agent.policy_state import LiveList, PolicyState, Trust
from controlplane.agent.policy_trial import trial_refusal
from controlplane.agent.routes import AdminRoutes, TenantRoutes
from controlplane.agent.spool_store import SpoolStore
from controlplane.agent.tracing import SpanSink, Tracer
from controlplane.core.batching import ServiceTime
from controlplane.core.reasons import Outcome

log = logging.getLogger(__name__)

LOCK_FILE: Final = "lock"
LAST_REPORT_S: Final = 3.0
LAST_TRACES_S: Final = 2.0


def make_backend(options: Options) -> Backend:
    """The backend of the options."""
    if options.backend == "openai":
        return OpenAIBackend(options.upstream, send_priority=options.upstream_priority)
    if options.backend == "triton":
        names = TritonOptions(text_input=options.triton_text_input, embedding_output=options.triton_embedding_output)
        return TritonBackend(options.upstream, names)
    batch_curve = ServiceTime(options.sim_batch_fixed_us, options.sim_batch_input_us)
    curve = CURVES[options.sim_gpu]
    return SimBackend(curve, seed=options.seed, speed=options.sim_speed, batch_curve=batch_curve)


def make_watch(options: Options, engine: Engine) -> EngineWatch | None:
    """What watches the inference server of the options, and its GPUs, if there is one."""
    if not options.upstream:
        return None
    if options.backend == "triton":
        address = metrics_url(options.upstream, options.triton_metrics)
        watch: EngineWatch = TritonWatch(options.upstream, address, lambda: engine.registry.model)
    else:
        watch = EngineWatch(options.upstream)
    if options.dcgm_metrics:
        watch.gpus = GpuWatch(options.dcgm_metrics, options.dcgm_gpus)
    return watch


def make_tracer(options: Options) -> Tracer | None:
    """The tracer of the options, if any. Raises UsageError where OpenTelemetry is not installed: it is an extra."""
    if not options.otlp_endpoint:
        return None
    try:
        module = importlib.import_module("controlplane.agent.otlp_export")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--otlp-endpoint needs OpenTelemetry ({error.name} is missing): pip install --require-hashes --no-deps "
            "-r requirements/tracing.txt"
        ) from error
    sink: SpanSink = module.OtlpSink(options.otlp_endpoint, agent=options.name)
    return Tracer(sink, rate=options.otlp_sample)


class AgentProcess:
    """One agent. Made inside a running event loop. Raises AgentError when another process holds the state directory."""

    def __init__(self, options: Options, identity: Identity) -> None:
        self.options = options
        self._lock = _lock(options)
        clock = Clock()
        state_dir = options.state_dir
        self.backend = make_backend(options)
        self.engine = Engine(clock=clock, backend=self.backend, agent_id=0, state_dir=state_dir)
        self.engine.tracer = make_tracer(options)
        self.engine.registry.estimates.update(estimate_file.load(state_dir))
        self._keeping: asyncio.Task[None] | None = None
        self.watch = make_watch(options, self.engine)
        if self.watch is not None and isinstance(self.backend, OpenAIBackend):
            self.watch.heard = self.backend.reads
            self.backend.unreachable = self.watch.look_now
        self.store = SpoolStore(state_dir / "spool", bytes_max=options.spool_bytes_max)
        self.client = ControlPlane(options.control_plane, identity.key, "", clock.now_us)
        self.control = Control(
            options,
            identity,
            self.client,
            self.engine,
            self.store,
            PolicyState(state_dir, trial_refusal),
            LiveList(state_dir),
        )
        self.front = HttpFront(TenantRoutes(self.engine), connections_max=clients_max(raise_limit()))
        self.admin = HttpFront(AdminRoutes(self.engine, self.store, self.control), connections_max=64)
        self.nudges: NudgeListener | None = None
        self.port = 0
        self.admin_port = 0

    async def serve(self) -> None:
        """Listen, enrol, report; ends only by cancellation or with an AgentError."""
        options = self.options
        await self.backend.open()
        self.port = await self.front.listen(options.listen.host, options.listen.port)
        self.admin_port = await self.admin.listen(options.admin_listen.host, options.admin_listen.port)
        log.info(
            "listening on %s:%d, admin on %s:%d",
            options.listen.host,
            self.port,
            options.admin_listen.host,
            self.admin_port,
        )
        self._keeping = asyncio.create_task(self._keep_estimates())
        if self.watch is not None:
            self.watch.start()
            self.engine.readiness.follow(self.watch)
        await self.control.begin()
        self.control.on_trust = self._listen_to_nudges
        self._listen_to_nudges(self.control.trust)
        await self.control.run()

    def _listen_to_nudges(self, trust: Trust) -> None:
        if self.nudges is not None:
            self.nudges.trust = trust
        elif self.control.broker:
            agent = self.client.agent
            self.nudges = NudgeListener(self.control.broker, agent, trust, self.control, asyncio.get_running_loop())
            self.nudges.start()

    async def _keep_estimates(self) -> None:
        """Write down what was learnt of requests, off the event loop."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(estimate_file.EVERY_S)
            body = estimate_file.encode(self.engine.registry.estimates)
            await loop.run_in_executor(None, estimate_file.save, self.options.state_dir, body)

    async def end(self, *, orderly: bool) -> None:
        """Stop accepting, let requests finish within the bound, cancel the rest, report and seal."""
        engine, options = self.engine, self.options
        engine.draining = True
        self.front.stop_accepting()
        if self.nudges is not None:
            self.nudges.stop()
        if orderly:
            loop = asyncio.get_running_loop()
            until = loop.time() + options.drain_timeout_s
            while engine.calls and loop.time() < until:
                await asyncio.sleep(0.05)
            cancelled = engine.cancel_all(Outcome.CANCELLED_BY_DRAIN)
            if cancelled:
                log.warning("%d requests were still running after %g s: cancelled", cancelled, options.drain_timeout_s)
        engine.stop()
        if self._keeping is not None:
            self._keeping.cancel()
        if orderly:
            estimate_file.save(options.state_dir, estimate_file.encode(engine.registry.estimates))
        if orderly and engine.spool is not None:
            await self.control.end(LAST_REPORT_S)
        if engine.tracer is not None:
            await asyncio.get_running_loop().run_in_executor(None, engine.tracer.close, LAST_TRACES_S)
        await self.front.close()
        await self.admin.close(within_s=0.1)
        await self.backend.close()
        if self.watch is not None:
            await self.watch.close()
        await self.client.close()
        self.store.close()
        os.close(self._lock)


def _lock(options: Options) -> int:
    """One process per state directory; the lock goes with the process, however it ends."""
    descriptor = os.open(options.state_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise AgentError(
            f"another agent uses {options.state_dir}: stop it, or give this one its own --state-dir"
        ) from None
    return descriptor
