"""A whole system of real processes on servers of its own, kept up by the supervisor while a test kills its parts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import openai
import psycopg

from controlplane.demo.settings import child_environment, python
from controlplane.demo.shape import SMALL_MODEL, SMALL_POOL
from controlplane.embedded.ports import free_port
from controlplane.embedded.postgres import prepare_postgres
from controlplane.embedded.valkey import prepare_valkey
from controlplane.supervisor.child import Child, RestartPolicy
from controlplane.supervisor.servers import postgres_child, valkey_child
from controlplane.supervisor.supervisor import Supervisor

#: As often as a test likes to kill; the pauses stay short, so that most kills meet a system at work.
ALWAYS = RestartPolicy(limit=200, backoff_s=0.2, backoff_s_max=1.0, healthy_after_s=2.0)
AGENTS = ("gpu-1", "gpu-2")
TENANT = "hooli"
MODEL = SMALL_MODEL
OUTPUT_TOKENS = 24


class JobSystem:
    """PostgreSQL, broker, web, worker, beat, controller and two agents with simulated GPUs.

    `start` once inside the supervisor's block. Everything is under `folder`; ports are free ones of the loopback.
    """

    def __init__(self, folder: Path, supervisor: Supervisor) -> None:
        self.folder = folder
        self.var = folder / "var"
        self.supervisor = supervisor
        self.address = f"http://127.0.0.1:{free_port()}"
        self.postgres = prepare_postgres(self.var)
        self.valkey = prepare_valkey(self.var)
        self.secret = ""
        self.admin: dict[str, str] = {}
        """Admin address of each agent."""

    def start(self) -> None:
        self.supervisor.start(*(replace(each, restart=ALWAYS) for each in self._servers()))
        self._set_up()
        seeded = json.loads((self.folder / "seeded.json").read_bytes())
        self.secret = seeded["keys"][TENANT]
        self.supervisor.start(*self._control_plane())
        tokens = seeded["enrolment_tokens"]
        self.supervisor.start(*(self._agent(name, tokens[name]) for name in AGENTS))

    def _servers(self) -> list[Child]:
        return [postgres_child(self.postgres), valkey_child(self.valkey)]

    def environment(self, *, as_owner: bool = False) -> dict[str, str]:
        owner = self.postgres.role_dsn("owner")
        return dict(
            child_environment(
                database=owner if as_owner else self.postgres.role_dsn("app"),
                owner=owner,
                redis=self.valkey.url,
                broker=self.valkey.url,
                var_dir=self.var,
                as_owner=as_owner,
            )
        )

    def _set_up(self) -> None:
        set_up = python("manage.py", "set_up", "--name", "Night", "--billing-zone", "Europe/Berlin")
        self.supervisor.run("migrations", set_up, env=self.environment(as_owner=True))
        seed = python(
            "manage.py", "demo_seed", "--folder", str(self.folder / "demo"), "--agents",
            ",".join(f"{name}:{SMALL_POOL}" for name in AGENTS), "--prompt-tokens", "2000", "--output-tokens", "512",
            "--out", str(self.folder / "seeded.json"),
        )  # fmt: skip
        self.supervisor.run("organisation", seed, env=self.environment())

    def _control_plane(self) -> list[Child]:
        env, celery = self.environment(), python("-m", "celery", "-A", "controlplane.config")
        web = python(
            "-m", "uvicorn", "controlplane.config.asgi:application", "--host", "127.0.0.1", "--port",
            self.address.rpartition(":")[2], "--http", "controlplane.config.asgi:HttpProtocol", "--no-access-log",
            "--log-level", "warning",
        )  # fmt: skip
        worker = [*celery, "worker", "--pool", "threads", "--concurrency", "4", "--loglevel", "WARNING"]
        return [
            Child("web", web, env=env, ready=f"{self.address}/healthz", stop_order=20, restart=ALWAYS),
            Child("worker", worker, env=env, stop_order=10, restart=ALWAYS),
            Child("beat", [*celery, "beat", "--loglevel", "WARNING"], env=env, stop_order=5, restart=ALWAYS),
            Child("controller", python("manage.py", "controller"), env=env, stop_order=8, restart=ALWAYS),
        ]

    def _agent(self, name: str, token: str) -> Child:
        listen, admin = free_port(), free_port()
        argv = python(
            "-m", "controlplane.agent", "--control-plane", self.address, "--name", name, "--state-dir",
            str(self.var / "agents" / name), "--backend", "sim", "--sim-gpu", "a100", "--slots", "2", "--listen",
            f"127.0.0.1:{listen}", "--admin-listen", f"127.0.0.1:{admin}", "--enrol-token", token,
        )  # fmt: skip
        ready, self.admin[name] = f"http://127.0.0.1:{listen}/readyz", f"http://127.0.0.1:{admin}"
        return Child(name, argv, env=self.environment(), ready=ready, stop_order=1, restart=ALWAYS)

    # -- kills ---------------------------------------------------------------------------------------------------------

    def kill(self, name: str, timeout_s: float = 60.0) -> None:
        """SIGKILL to a child, once it is at work."""
        wait_until(lambda: self._kill_now(name), f"{name} is ready", timeout_s)

    def _kill_now(self, name: str) -> bool:
        self.supervisor.check()
        if self.supervisor.states()[name] != "ready":
            return False
        pid = self.supervisor.pids().get(name)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def all_ready(self) -> bool:
        """Whether every child that is to run does; the tasks at the beginning have ended."""
        self.supervisor.check()
        return set(self.supervisor.states().values()) <= {"ready", "stopped"}

    def holder(self) -> str | None:
        """The agent that holds most leases; None while the database cannot say."""
        try:
            with self.database() as database:
                row = database.execute(
                    "SELECT a.name FROM jobs_itemholder h JOIN fleet_agent a ON a.id = h.agent_id"
                    " WHERE h.held > 0 ORDER BY h.held DESC, a.name LIMIT 1"
                ).fetchone()
        except psycopg.Error:
            return None
        return row[0] if row else None

    # -- looking -------------------------------------------------------------------------------------------------------

    def database(self) -> psycopg.Connection:
        """A connection as the owner. Raises psycopg.Error while the server is down."""
        return psycopg.connect(self.postgres.role_dsn("owner"), connect_timeout=5, autocommit=True)

    def client(self) -> openai.OpenAI:
        """The official client; it asks again while the web process is down, as its users' programs do."""
        return openai.OpenAI(api_key=self.secret, base_url=f"{self.address}/v1", max_retries=30, timeout=20)


def wait_until(
    reached: Callable[[], bool], what: str | Callable[[], str], timeout_s: float, *, every_s: float = 0.1
) -> float:
    """Waits until something is so; the seconds it took. Raises AssertionError with `what` in it."""
    began = time.monotonic()
    while not reached():
        if time.monotonic() - began > timeout_s:
            raise AssertionError(f"not so within {timeout_s:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(every_s)
    return time.monotonic() - began


def names(prefix: str, count: int) -> list[str]:
    """Custom ids whose order is no order of texts or hashes: only the input's."""
    return [f"{prefix}-{number * 7919 % count:05d}" for number in range(count)]


def batch_file(custom_ids: list[str]) -> bytes:
    """Lines of a batch file, one short document each."""
    lines = []
    for number, custom_id in enumerate(custom_ids):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Document {number}: " + "pumps and valves " * (1 + number % 9)}],
            "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True,
        }
        row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(row).encode() + b"\n")
    return b"".join(lines)
