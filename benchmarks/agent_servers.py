"""Processes of the agent's benchmark: started on a core of their own, waited for, measured, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.agent_client import Load
from benchmarks.agent_control import World

ROOT = Path(__file__).resolve().parent.parent
CORES = sorted(os.sched_getaffinity(0))
UNDER_TEST = CORES[0]
ROUND_IT = CORES[-1]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_TIMEOUT_S = 120.0
GIVES_WAY = 19
"""Niceness of the control plane: it shares a core with clients and inference server, and its reading of a report, some
milliseconds each second, would be measured as if the agent had been late. In use it runs on another machine."""

NGINX_CONF = """
worker_processes 1; daemon off; pid {home}/pid; error_log {home}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; keepalive_requests 100000000; server_tokens off;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  upstream inference {{ server 127.0.0.1:{upstream}; keepalive 4096; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://inference; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A process that listens."""

    name: str
    pid: int
    port: int
    bearer: str = ""
    admin_port: int = 0

    def cpu_s(self) -> float:
        """CPU seconds of the process and its children so far."""
        return cpu_of(self.pids()).all_s

    def pids(self) -> list[int]:
        """The process and its children."""
        return [self.pid, *(one.pid for one in psutil.Process(self.pid).children(recursive=True))]

    def waited_s(self) -> float:
        """Seconds in which its main thread could have run and another process had the core; 0 where nobody counts."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def rss_kib(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss // 1024)


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of some processes."""

    user_s: float = 0.0
    kernel_s: float = 0.0

    @property
    def all_s(self) -> float:
        return self.user_s + self.kernel_s

    def since(self, before: Cpu) -> Cpu:
        return Cpu(self.user_s - before.user_s, self.kernel_s - before.kernel_s)


def cpu_of(pids: list[int]) -> Cpu:
    """CPU seconds of processes so far; one that has ended counts nothing."""
    user, kernel = 0, 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            user, kernel = user + int(fields[11]), kernel + int(fields[12])
    return Cpu(user / TICKS_PER_S, kernel / TICKS_PER_S)


@contextlib.contextmanager
def running(
    name: str,
    command: list[str],
    *,
    port: int,
    core: int,
    home: Path,
    environment: dict[str, str] | None = None,
    nice: int = 0,
) -> Iterator[Server]:
    """A process pinned to a core, until the block ends; an empty variable in `environment` takes that one out."""

    def settle() -> None:
        os.sched_setaffinity(0, {core})
        os.nice(nice)

    log = home / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={name: value for name, value in {**os.environ, **(environment or {})}.items() if value},
            preexec_fn=settle,
        )
    try:
        _wait_for(process, port, log)
        yield Server(name, process.pid, port)
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    process.kill()
    raise SystemExit(f"{process.args} does not listen on {port}:\n{log.read_text()[-2_000:]}")


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


@contextlib.contextmanager
def upstream(home: Path, *arguments: str) -> Iterator[Server]:
    port = free_port()
    command = python("benchmarks.agent_upstream", str(port), *arguments)
    with running(f"upstream-{port}", command, port=port, core=ROUND_IT, home=home) as server:
        yield server


@contextlib.contextmanager
def agent(home: Path, inference: Server, **world: int) -> Iterator[tuple[Server, Server]]:
    """An agent with its control plane, once it takes requests."""
    control_port, port, admin_port = free_port(), free_port(), free_port()
    known = World(port=control_port, **world)
    state_dir = home / f"agent-{port}"
    # fmt: off
    command = python(
        "controlplane.agent", "--control-plane", f"http://127.0.0.1:{control_port}", "--enrol-token", "bench",
        "--name", "bench", "--state-dir", str(state_dir), "--backend", "openai",
        "--upstream", f"http://127.0.0.1:{inference.port}", "--slots", "4", "--listen", f"127.0.0.1:{port}",
        "--admin-listen", f"127.0.0.1:{admin_port}", "--drain-timeout", "1",
    )
    # fmt: on
    plane = python("benchmarks.agent_control", msgspec.json.encode(known).decode())
    with (
        running(
            f"control-{control_port}", plane, port=control_port, core=ROUND_IT, home=home, nice=GIVES_WAY
        ) as control,
        running(f"agent-{port}", command, port=port, core=UNDER_TEST, home=home) as server,
    ):
        server.name, server.admin_port = "agent", admin_port
        _until_ready(server, home)
        yield server, control
    shutil.rmtree(state_dir, ignore_errors=True)


def _until_ready(server: Server, home: Path) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{server.port}/readyz", timeout=1):
            return
        time.sleep(0.1)
    log = (home / f"agent-{server.port}.log").read_text()
    raise SystemExit(f"the agent did not become ready:\n{log[-2_000:]}")


def counts(control: Server) -> dict[str, Any]:
    """What the control plane has taken so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{control.port}/counts", timeout=10) as answer:
        return json.loads(answer.read())


def completed(agent: Server) -> int:
    """Requests that the agent says it has completed."""
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.admin_port}/healthz", timeout=10) as answer:
        return int(json.loads(answer.read())["requests"]["ended"].get("completed", 0))


@contextlib.contextmanager
def forwarder(home: Path, inference: Server) -> Iterator[Server]:
    """The agent's gateway and backend without anything between them."""
    port = free_port()
    command = python("benchmarks.agent_forwarder", str(port), f"http://127.0.0.1:{inference.port}")
    with running("forwarder", command, port=port, core=UNDER_TEST, home=home) as server:
        yield server


def nginx_program() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextlib.contextmanager
def nginx(home: Path, inference: Server) -> Iterator[Server | None]:
    """nginx as a plain reverse proxy; None where it is not installed."""
    program = nginx_program()
    if program is None:
        yield None
        return
    port, own = free_port(), home / "nginx"
    own.mkdir()
    (own / "nginx.conf").write_text(NGINX_CONF.format(home=own, port=port, upstream=inference.port))
    command = [program, "-p", str(own), "-c", str(own / "nginx.conf")]
    with running("nginx", command, port=port, core=UNDER_TEST, home=home) as server:
        yield server


def started(module: str, argument: str) -> bytes:
    """What a process beside the server under test prints."""
    done = subprocess.run(
        python(module, argument),
        capture_output=True,
        cwd=ROOT,
        check=False,
        preexec_fn=lambda: os.sched_setaffinity(0, {ROUND_IT}),
    )
    if done.returncode:
        raise SystemExit(f"{module} failed:\n{done.stderr.decode()[-2_000:]}")
    return done.stdout


def drive(load: Load) -> dict[str, Any]:
    """A round of load from a process of its own."""
    return json.loads(started("benchmarks.agent_client", msgspec.json.encode(load).decode()))
