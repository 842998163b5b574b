"""What the demo runs: its options, its fleet, and how much traffic keeps that fleet about 70 % busy."""

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.demo.shape import BIG_POOL, DECODE_US, PREFILL_US, SMALL_POOL, Bounds
from controlplane.embedded.ports import choose_port
from controlplane.lab.traces import Trace

FIRST_AGENT_PORT = 9_001
FIRST_ADMIN_PORT = 9_101
BIG_SLOTS, SMALL_SLOTS = 8, 2
INTERACTIVE_SLOTS = 6
LOAD_TARGET = 0.70


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """One agent of the demo fleet and where it listens."""

    name: str
    pool: str
    slots: int
    port: int
    admin_port: int
    gpu: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admin_address(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"


@dataclass(frozen=True, slots=True)
class Options:
    port: int
    agents: int
    var_dir: Path
    seed: int = 20_261_129
    trace: Path | None = None
    speed: float | None = None
    headless: bool = False
    seconds: float | None = None
    json: Path | None = None
    parsed: Trace | None = field(default=None, compare=False)

    @property
    def bounds(self) -> Bounds:
        """The longest prompt and answer to expect: the trace's own maxima, or those of the synthetic tables."""
        if self.parsed is None:
            return Bounds(prompt_tokens=8_000, output_tokens=2_048)
        return Bounds(
            prompt_tokens=max(2_000, *(request.prompt_tokens for request in self.parsed.requests)),
            output_tokens=max(512, *(request.output_tokens for request in self.parsed.requests)),
        )


def fleet(agents: int) -> list[AgentPlace]:
    """The big agent with its flex band, and the small ones; ports that are taken give way to the next free ones."""
    places = []
    for number in range(agents):
        big = number == 0
        places.append(
            AgentPlace(
                name=f"gpu-{number + 1}",
                pool=BIG_POOL if big else SMALL_POOL,
                slots=BIG_SLOTS if big else SMALL_SLOTS,
                port=agent_port(FIRST_AGENT_PORT + number),
                admin_port=agent_port(FIRST_ADMIN_PORT + number),
                gpu="h100" if big else "a100",
            )
        )
    return places


def agent_port(preferred: int) -> int:
    """The preferred port, or the next best one when it is taken."""
    return choose_port(explicit=None, recorded=None, preferred=preferred, settle_s=0.0)


def chosen_speed(trace: Trace) -> float:
    """How much faster than real time a trace is replayed so that its work fills 70 % of the interactive slots."""
    work_us = sum(r.prompt_tokens * PREFILL_US + r.output_tokens * DECODE_US for r in trace.requests)
    span_us = max(1, trace.length_us)
    return max(0.01, round(LOAD_TARGET * INTERACTIVE_SLOTS * span_us / max(1, work_us), 2))


def child_environment(
    *, database: str, owner: str, redis: str, broker: str, var_dir: Path, as_owner: bool = False
) -> Mapping[str, str]:
    """The environment of the system's processes; secrets travel in files or here, never on command lines."""
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
        "FLEXBAND_VAR": str(var_dir),
        "FLEXBAND_SECRET_KEY_FILE": str(secret_key_file(var_dir)),
        "FLEXBAND_INSECURE_LOOPBACK": "true",
        "DATABASE_URL": database,
        "DATABASE_OWNER_URL": owner,
        "FLEXBAND_AS_OWNER": "true" if as_owner else "false",
        "REDIS_URL": redis,
        "CELERY_BROKER_URL": broker,
        "FLEXBAND_AGENT_BROKER_URL": broker,
    }


def write_environment(file: Path, environment: Mapping[str, str]) -> None:
    """A file that a shell reads (`. file`) to speak with this run: what differs from our own environment. It holds
    passwords and is its owner's only.
    """
    differs = [(name, value) for name, value in environment.items() if os.environ.get(name) != value]
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in differs]
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_text("".join(lines), encoding="utf-8")


def secret_key_file(var_dir: Path) -> Path:
    """The installation's secret, made at the first start, readable by its owner only."""
    file = var_dir / "secret-key"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_text(secrets.token_urlsafe(50), encoding="utf-8")
    return file


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]
