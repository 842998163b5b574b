"""Which modules agents and the lab may load as machine code, and where a build of exactly these sources lies.

A build is named by the digest of all sources of the packages below, of the interpreter it was made for, and of librt's
version. Edited sources have another name, so an old build is never loaded: whoever edits runs what is written.
"""

from __future__ import annotations

import hashlib
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
BUILDS: Final = ROOT / "compiled"
SOURCES: Final = ("core", "wire", "agent", "lab")
"""Packages whose sources name a build: compiled code has constants of modules that are not compiled in it."""
MODULES: Final = (
    "core.admission", "core.admission_snapshot", "core.class_queue", "core.estimate", "core.explain_admission",
    "core.fairness", "core.histogram", "core.minimum_share", "core.money", "core.preemption", "core.pricing",
    "core.queued_request", "core.reasons", "core.reservations", "core.retry_budget", "core.scheduling",
    "core.size_classes", "core.slot_choice", "core.slot_meter", "core.slots",
    "agent.agent_slot", "agent.api_body", "agent.attempt", "agent.backends.openai", "agent.backends.request",
    "agent.backends.sse", "agent.backends.upstream_connection", "agent.call", "agent.call_headers", "agent.chunks",
    "agent.clock", "agent.engine", "agent.frames", "agent.front_desk", "agent.gateway", "agent.http_exchange",
    "agent.known_heads", "agent.latency_totals", "agent.learning", "agent.live_figures", "agent.meters",
    "agent.objectives", "agent.purses", "agent.readiness", "agent.refusal_log", "agent.registry", "agent.replies",
    "agent.request_ids", "agent.routes", "agent.settlement", "agent.sliding", "agent.spool", "agent.tokenless_time",
    "lab.calls", "lab.ends", "lab.items", "lab.pool_control", "lab.prefills", "lab.service", "lab.simulator",
    "lab.storm", "lab.timeline",
)  # fmt: skip
"""What a request passes, below `controlplane`. Modules that define a `msgspec.Struct` stay as they are."""


def path_of(module: str, root: Path = ROOT) -> Path:
    """Source of a module of `MODULES`."""
    return root / "controlplane" / (module.replace(".", "/") + ".py")


def _librt() -> str:
    """Version of the library that came with mypyc and that its code needs where it runs; empty where it is missing."""
    try:
        return version("librt")
    except PackageNotFoundError:
        return ""


def digest(root: Path = ROOT) -> str:
    """Name of the build of these sources for this interpreter, 24 hexadecimal digits."""
    found = hashlib.sha256(str(sysconfig.get_config_var("EXT_SUFFIX")).encode())
    found.update("\n".join(MODULES).encode())
    found.update(f"\0{_librt()}".encode())
    for package in SOURCES:
        for path in sorted((root / "controlplane" / package).rglob("*.py")):
            found.update(b"\0%b\0" % path.relative_to(root).as_posix().encode())
            found.update(path.read_bytes())
    return found.hexdigest()[:24]
