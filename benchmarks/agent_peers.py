"""Servers that the agent is compared with, from PyPI, in environments of their own under `var/`.

LiteLLM's proxy in its better configuration: its optional packages are there, so that it does not look for them with
every request. Where it cannot be installed, a plain Starlette application over httpx stands in for it; where nothing
can, there is no peer, and no ratio.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.agent_servers import ROOT, UNDER_TEST, Server, free_port, running

CACHE = ROOT / "var" / "bench"
INSTALL_TIMEOUT_S = 900
LITELLM = ("litellm[proxy]", "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp", "prisma",
           "httptools", "uvloop")  # fmt: skip
STARLETTE = ("starlette", "httpx", "uvicorn", "httptools", "uvloop")
BEARER = "sk-bench-0123456789abcdef"
CONFIG = """
model_list:
  - model_name: llama-70b
    litellm_params: {{model: openai/llama-70b, api_base: "http://127.0.0.1:{upstream}/v1", api_key: sk-none}}
litellm_settings: {{telemetry: false, num_retries: 0, request_timeout: 60, set_verbose: false}}
general_settings: {{disable_spend_logs: true}}
"""


def environment(name: str, packages: tuple[str, ...]) -> Path | None:
    """A virtual environment with some packages, made on first use; None where that fails."""
    home = CACHE / name
    done = home / "installed"
    if done.exists():
        return home
    sys.stdout.write(f"installing {packages[0]} into {home.relative_to(ROOT)} ...\n")
    sys.stdout.flush()
    commands = [
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages],
    ]
    for command in commands:
        try:
            made = subprocess.run(command, capture_output=True, check=False, timeout=INSTALL_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.stdout.write(f"peer missing: {error}\n")
            return None
        if made.returncode:
            sys.stdout.write(f"peer missing: {made.stderr.decode()[-300:]}\n")
            return None
    done.touch()
    return home


def version_of(home: Path, package: str) -> str:
    """The installed version of a package in an environment."""
    program = f"import importlib.metadata as m; print(m.version({package!r}))"
    told = subprocess.run([str(home / "bin" / "python"), "-c", program], capture_output=True, check=False)
    return told.stdout.decode().strip() or "?"


@contextlib.contextmanager
def peer(home: Path, inference: Server) -> Iterator[Server | None]:
    """LiteLLM, or the next best, in front of an inference server; its name has the version."""
    found = environment("litellm", LITELLM)
    if found is not None:
        with _litellm(found, home, inference) as server:
            yield server
        return
    found = environment("starlette", STARLETTE)
    if found is None:
        yield None
        return
    port = free_port()
    command = [str(found / "bin" / "python"), str(ROOT / "benchmarks" / "agent_starlette.py"), str(port)]
    command.append(f"http://127.0.0.1:{inference.port}")
    with running("starlette", command, port=port, core=UNDER_TEST, home=home) as server:
        server.name = f"starlette {version_of(found, 'starlette')} + httpx {version_of(found, 'httpx')}"
        yield server


@contextlib.contextmanager
def _litellm(found: Path, home: Path, inference: Server) -> Iterator[Server]:
    port, config = free_port(), home / "litellm.yaml"
    config.write_text(CONFIG.format(upstream=inference.port))
    command = [str(found / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port),
               "--num_workers", "1"]  # fmt: skip
    settings = {"LITELLM_MASTER_KEY": BEARER, "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # It would take the database of this project for its own.
    settings |= {"DATABASE_URL": "", "REDIS_URL": ""}
    with running("litellm", command, port=port, core=UNDER_TEST, home=home, environment=settings) as server:
        server.name, server.bearer = f"LiteLLM {version_of(found, 'litellm')}", BEARER
        yield server
