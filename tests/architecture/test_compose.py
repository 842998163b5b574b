"""The compose file describes the processes that run: its schema holds and each command starts the real thing."""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from controlplane.embedded.ports import free_port
from controlplane.embedded.throwaway import throwaway_servers
from tests.architecture.compose_file import ROOT, compose

SERVICES = {"postgres", "rabbitmq", "valkey", "migrate", "web", "worker", "beat", "controller", "agent"}
OURS = ("migrate", "web", "worker", "beat", "controller", "agent")
KEYS = {
    "build", "image", "environment", "secrets", "restart", "depends_on", "command", "ports", "volumes", "healthcheck",
}  # fmt: skip
CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


def test_every_service_has_what_compose_needs():
    document = compose({})
    assert set(document["services"]) == SERVICES
    for name, service in document["services"].items():
        assert set(service) <= KEYS, name
        assert service.get("image"), name
        for needed, how in service.get("depends_on", {}).items():
            assert needed in SERVICES and how["condition"] in CONDITIONS, name
            if how["condition"] == "service_healthy":
                assert document["services"][needed]["healthcheck"]["test"], needed
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in document["volumes"], name
        for secret in service.get("secrets", []):
            assert secret in document["secrets"], name
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port), f"{name} is open to the network"


def test_only_worker_and_controller_hold_the_signing_keys():
    services = compose({})["services"]
    holders = {name for name in OURS if any("signing-keys" in volume for volume in services[name].get("volumes", []))}
    assert holders == {"worker", "controller"}


def test_the_servers_are_those_of_the_design():
    services = compose({})["services"]
    assert services["postgres"]["image"].startswith("postgres:")
    assert services["rabbitmq"]["image"].startswith("rabbitmq:")
    assert "valkey" in services["valkey"]["image"]
    assert services["web"]["environment"]["CELERY_BROKER_URL"].startswith("amqp://")


def test_every_variable_is_one_that_the_settings_read():
    source = (ROOT / "controlplane/config/settings.py").read_text()
    for name in OURS:
        for variable in compose({})["services"][name]["environment"]:
            assert f'"{variable}"' in source, f"{name}: nothing reads {variable}"


class Started:
    """The compose file's processes on this machine: addresses moved to loopback, paths to a folder, nothing else."""

    def __init__(self, folder, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        servers = stack.enter_context(throwaway_servers())
        # The image's POSTGRES_USER may make roles; so may this server's superuser, on the same database.
        superuser = urlsplit(servers.postgres.dsn)
        self.owner_dsn = urlunsplit(superuser._replace(path=urlsplit(servers.postgres.owner_dsn).path))
        self.port, self.agent_port, self.admin_port = free_port(), free_port(), free_port()
        (folder / "secret_key").write_text("k" * 60)
        broker = os.environ.get("FLEXBAND_RABBITMQ_URL", servers.valkey.url)
        self.values = {
            "DATABASE_URL": servers.postgres.app_dsn,
            "DATABASE_OWNER_URL": self.owner_dsn,
            "REDIS_URL": servers.valkey.url,
            "CELERY_BROKER_URL": broker,
            "APP_PASSWORD": re.search(r"app:([^@]+)@", servers.postgres.app_dsn).group(1),
        }

    def local(self, text: str) -> str:
        moves = {
            "/run/secrets/secret_key": str(self.folder / "secret_key"),
            "/var/lib/flexband": str(self.folder / "var"),
            "http://web:8000": f"http://127.0.0.1:{self.port}",
            "0.0.0.0:9001": f"127.0.0.1:{self.agent_port}",
            "127.0.0.1:9101": f"127.0.0.1:{self.admin_port}",
            "0.0.0.0": "127.0.0.1",
        }
        for old, new in moves.items():
            text = text.replace(old, new)
        return str(self.port) if text == "8000" else text

    def start(self, name: str, **values: str) -> subprocess.Popen[bytes]:
        service = compose(self.values | values)["services"][name]
        command = [self.local(part) for part in service["command"]]
        assert command[0] == "python"
        environment = {key: self.local(value) for key, value in service["environment"].items()}
        log = (self.folder / f"{name}.log").open("wb")
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "FLEXBAND_VAR": str(self.folder / "var"), **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        self.stack.callback(log.close)
        self.stack.callback(end, process)
        return process

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def seed(self) -> dict[str, str]:
        """A pool with an enrolment token, as an administrator would make them."""
        service = compose(self.values)["services"]["web"]
        environment = {key: self.local(value) for key, value in service["environment"].items()}
        out = self.folder / "seeded.json"
        subprocess.run(
            [sys.executable, "manage.py", "demo_seed", "--folder", str(self.folder / "demo"), "--agents",
             "sim-1:chat-70b", "--prompt-tokens", "4000", "--output-tokens", "400", "--out", str(out)],
            cwd=ROOT, env={"PATH": os.environ["PATH"], "FLEXBAND_VAR": str(self.folder / "var"), **environment},
            check=True, timeout=120,
        )  # fmt: skip
        return json.loads(out.read_text())["enrolment_tokens"]


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def until(condition, what: str, timeout_s: float = 90.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.25)
    raise AssertionError(what)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as answer:
            return answer.status < 400
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.slow
def test_every_command_starts_the_real_process(tmp_path):
    with ExitStack() as stack:
        started = Started(tmp_path, stack)
        (tmp_path / "var").mkdir()
        assert started.start("migrate").wait(120) == 0, started.log("migrate")
        token = started.seed()["sim-1"]
        running = {name: started.start(name) for name in ("web", "worker", "beat", "controller")}
        until(lambda: answers(f"http://127.0.0.1:{started.port}/healthz"), started.log("web"))
        running["agent"] = started.start("agent", ENROL_TOKEN=token)
        with psycopg.connect(started.owner_dsn, autocommit=True) as database:

            def one(sql: str):
                row = database.execute(sql).fetchone()
                return row and row[0]

            until(lambda: one("SELECT term FROM flex_controllerterm"), started.log("controller"))
            until(lambda: one("SELECT 1 FROM fleet_agentlive"), started.log("agent"))
            until(lambda: one("SELECT 1 FROM fleet_agentlive WHERE revision > 0"), started.log("worker"))
        until(lambda: answers(f"http://127.0.0.1:{started.agent_port}/readyz"), started.log("agent"))
        assert {name: process.poll() for name, process in running.items()} == dict.fromkeys(running)
