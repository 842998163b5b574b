"""`manage.py demo`: every process of the system as a real child, in order, with a line each; this process opens no
database.
"""

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from controlplane.agent.errors import RETIRED_STATUS
from controlplane.demo.agent_folders import agents_here, set_aside_strangers
from controlplane.demo.plan import Client, JobPlan, Source, Target, TrafficPlan, write_json
from controlplane.demo.settings import (
    AgentPlace,
    Options,
    child_environment,
    chosen_speed,
    fleet,
    python,
    write_environment,
)
from controlplane.demo.shape import BIG_MODEL, BIG_POOL, BULK, CHAT, SMALL_MODEL, SMALL_POOL
from controlplane.demo.viewer import ViewerPlan
from controlplane.embedded.postgres import prepare_postgres
from controlplane.embedded.valkey import prepare_valkey
from controlplane.supervisor.child import Child
from controlplane.supervisor.servers import postgres_child, valkey_child
from controlplane.supervisor.supervisor import Supervisor, SupervisorError

Say = Callable[[str], None]
DRAIN_S = 45.0
"""How long a headless run's clients wait for their answers, which its summary counts."""
HURRIED_DRAIN_S = 0.5
"""The same when somebody pressed Ctrl-C and waits."""
TRAFFIC_STOP_S = 15.0
"""Beside that: the job's cancellation, and a machine with much else to do."""
SETTLE_S = 180.0
RUN_FILES = {"marks": "marks.json", "traffic": "result.json", "viewer": "viewer.json"}


class Demo:
    """One run: servers, migrations, organisation, processes, fleet, traffic; then wait, or settle and sum up."""

    def __init__(self, options: Options, say: Say) -> None:
        self.options = options
        self.say = say
        self.folder = options.var_dir / "demo"
        self.places: list[AgentPlace] = []
        self.address = f"http://127.0.0.1:{options.port}"
        self.app: dict[str, str] = {}
        self.owner: dict[str, str] = {}

    @property
    def drain_s(self) -> float:
        return DRAIN_S if self.options.headless else HURRIED_DRAIN_S

    def run(self) -> None:
        """Returns after an orderly end. Raises SupervisorError or AlreadyRunningError, already told in a line."""
        require_free(self.options.port)
        with Supervisor(self.options.var_dir, say=self.say) as supervisor:
            self.places = fleet(self.options.agents)
            self._servers(supervisor)
            self._organisation(supervisor)
            seeded = msgspec.json.decode((self.folder / "seeded.json").read_bytes())
            self._set_aside(seeded["enrolled"])
            self._system(supervisor)
            self._agents(supervisor, seeded["enrolment_tokens"])
            self._traffic(supervisor, seeded)
            self._banner(seeded["logins"])
            if self.options.headless:
                supervisor.wait(self.options.seconds)
                self._settle(supervisor)
            else:
                supervisor.wait(self.options.seconds)

    def _servers(self, supervisor: Supervisor) -> None:
        var, own = self.options.var_dir, os.environ
        children, database, owner, redis = (
            [],
            own.get("DATABASE_URL"),
            own.get("DATABASE_OWNER_URL"),
            own.get("REDIS_URL"),
        )
        if database is None:
            postgres = prepare_postgres(var)
            children.append(postgres_child(postgres))
            database, owner = postgres.role_dsn("app"), postgres.role_dsn("owner")
        if redis is None:
            valkey = prepare_valkey(var)
            children.append(valkey_child(valkey))
            redis = valkey.url
        values: dict[str, Any] = {
            "database": database,
            "owner": owner or database,
            "redis": redis,
            "broker": own.get("CELERY_BROKER_URL", redis),
            "var_dir": var,
        }
        self.app = dict(child_environment(**values))
        self.owner = dict(child_environment(**values | {"database": owner or database}, as_owner=True))
        write_environment(self.folder / "environment", self.app)
        if children:
            supervisor.start(*children)

    def _organisation(self, supervisor: Supervisor) -> None:
        bounds = self.options.bounds
        set_up = python("manage.py", "set_up", "--name", "Flexband demo", "--billing-zone", "Europe/Berlin")
        supervisor.run("migrations", set_up, env=self.owner)
        agents = ",".join(f"{place.name}:{place.pool}" for place in self.places)
        here = ",".join(f"{name}:{agent}" for name, agent in agents_here(self.options.var_dir / "agents").items())
        supervisor.run(
            "demo organisation",
            python(
                "manage.py", "demo_seed", "--folder", str(self.folder), "--agents", agents, "--here", here,
                "--prompt-tokens", str(bounds.prompt_tokens), "--output-tokens", str(bounds.output_tokens), "--out",
                str(self.folder / "seeded.json"),
            ),
            env=self.app,
        )  # fmt: skip

    def _set_aside(self, enrolled: dict[str, str]) -> None:
        moved = set_aside_strangers(self.options.var_dir / "agents", enrolled)
        if moved:
            names = ", ".join(folder.name for folder in moved)
            self.say(
                f"  {moved[0].parent}: {names} set aside, this database does not know these agents; enrolling anew"
            )

    def _system(self, supervisor: Supervisor) -> None:
        celery = python("-m", "celery", "-A", "controlplane.config")
        supervisor.start(
            Child(
                "web",
                python(
                    "-m", "uvicorn", "controlplane.config.asgi:application", "--host", "127.0.0.1", "--port",
                    str(self.options.port), "--http", "controlplane.config.asgi:HttpProtocol", "--ws",
                    "controlplane.config.asgi:WebSocketProtocol", "--no-access-log", "--log-level", "warning",
                    "--timeout-graceful-shutdown", "3",
                ),
                env=self.app,
                ready=f"{self.address}/healthz",
                stop_order=20,
            ),
            Child(
                "worker",
                [*celery, "worker", "--pool", "threads", "--concurrency", "4", "--loglevel", "WARNING"],
                env=self.app,
                stop_order=10,
            ),
            Child("beat", [*celery, "beat", "--loglevel", "WARNING"], env=self.app, stop_order=5),
            Child("controller", python("manage.py", "controller"), env=self.app, stop_order=8),
        )  # fmt: skip

    def _agents(self, supervisor: Supervisor, tokens: dict[str, str]) -> None:
        supervisor.start(*(self._agent(place, number, tokens) for number, place in enumerate(self.places)))

    def _agent(self, place: AgentPlace, number: int, tokens: dict[str, str]) -> Child:
        argv = python(
            "-m", "controlplane.agent", "--control-plane", self.address, "--name", place.name, "--state-dir",
            str(self.options.var_dir / "agents" / place.name), "--backend", "sim", "--sim-gpu", place.gpu, "--slots",
            str(place.slots), "--listen", f"127.0.0.1:{place.port}", "--admin-listen", f"127.0.0.1:{place.admin_port}",
            "--seed", str(self.options.seed + number),
        )  # fmt: skip
        if place.name in tokens:
            argv += ["--enrol-token", tokens[place.name]]
        return Child(
            f"agent {place.name}",
            argv,
            env=self.app,
            ready=f"{place.address}/readyz",
            over=frozenset({RETIRED_STATUS}),
            stop_order=1,
            stop_timeout_s=20.0,
        )

    def _traffic(self, supervisor: Supervisor, seeded: dict[str, Any]) -> None:
        write_json(self.folder / "plan.json", self.plan(seeded["keys"]))
        for file in ("result.json", "viewer.json", "ends.log"):
            (self.folder / file).unlink(missing_ok=True)
        children = [
            Child(
                "traffic",
                python("-m", "controlplane.demo.traffic", str(self.folder / "plan.json")),
                env=self.app,
                stop_timeout_s=self.drain_s + TRAFFIC_STOP_S,
            )
        ]
        if self.options.headless:
            viewer = ViewerPlan(
                self.address, "admin", seeded["logins"]["admin"], [f"pool:{BIG_POOL}", "fleet"],
                str(self.folder / "viewer.json"),
            )  # fmt: skip
            write_json(self.folder / "viewer-plan.json", viewer)
            children.append(
                Child(
                    "viewer",
                    python("-m", "controlplane.demo.viewer", str(self.folder / "viewer-plan.json")),
                    env=self.app,
                    essential=False,
                )
            )
        supervisor.start(*children)

    def plan(self, keys: dict[str, str]) -> TrafficPlan:
        """Mixed traffic: interactive requests with bursts, and a batch job that wants more than its floor."""
        trace, speed = self.options.trace, self.options.speed
        chat = [("acme", 0.5), ("globex", 0.35), ("initech", 0.15)]
        clients = [Client(tenant, keys[tenant], CHAT, share) for tenant, share in chat]
        if trace is not None and self.options.parsed is not None:
            big = Source(BIG_POOL, BIG_MODEL, trace=str(trace), speed=speed or chosen_speed(self.options.parsed))
        else:
            # Quiet long enough for a loan, then a burst that takes it back. A burst stays in the p95 of the last 60 s,
            # and calm has to hold for 20 s more: with less than two minutes between bursts nothing would be lent.
            big = Source(
                BIG_POOL, BIG_MODEL, rate_per_s=3.0, speed=speed or 1.0, burst_first_s=50.0, burst_every_s=150.0,
                burst_length_s=12.0, burst_factor=7.0, prompt_max=6_000, output_max=300,
            )  # fmt: skip
        small = Source(SMALL_POOL, SMALL_MODEL, rate_per_s=1.0, prompt_max=3_000, output_max=120)
        # Some 2.5 slots' work until its deadline: more than its floor of two, and three leave it too little slack.
        job = JobPlan(
            "hooli", keys["hooli"], BIG_POOL, BIG_MODEL, BULK, items=5_900, prompt_tokens=400, output_tokens=180,
            deadline_s=1_800,
        )  # fmt: skip
        return TrafficPlan(
            control_plane=self.address,
            seed=self.options.seed,
            targets=[Target(place.name, place.pool, place.address) for place in self.places],
            clients={BIG_POOL: clients, SMALL_POOL: clients},
            sources=[big, small],
            jobs=[job],
            result=str(self.folder / "result.json"),
            ends=str(self.folder / "ends.log") if self.options.headless else "",
            drain_s=self.drain_s,
        )

    def _banner(self, logins: dict[str, str]) -> None:
        trace = self.options.parsed
        lines = ["", f"  Flexband is up: {self.address}/", ""]
        lines += [f"    {name:<12} {password}" for name, password in logins.items()]
        if trace is not None and self.options.trace is not None:
            speed = self.options.speed or chosen_speed(trace)
            lines += [
                "",
                f"  Replaying {self.options.trace.name}: {len(trace.requests)} requests at {speed:g} times their speed",
            ]
            lines += [f"  (seed {self.options.seed}; chosen so that their work fills about 70 % of the fleet)"]
        else:
            lines += [
                "",
                f"  Synthetic traffic, seed {self.options.seed}: a batch job borrows slots, bursts take them back.",
            ]
        lines += [f"  What to watch: {self.address}/pools/{BIG_POOL}/  (demo values: hold 20 s, cooldown 15 s)"]
        lines += ["  Ctrl-C stops everything; the next start goes on with this data.", ""]
        self.say("\n".join(lines))

    def _settle(self, supervisor: Supervisor) -> None:
        supervisor.stop("traffic", "viewer")
        out = (self.options.json or self.folder / "summary.json").resolve()
        files = [f"--{name}={self.folder / file}" for name, file in RUN_FILES.items()]
        admin = ",".join(f"{place.name}={place.admin_address}" for place in self.places)
        command = python("manage.py", "demo_summary", *files, f"--admin={admin}", f"--out={out}")
        supervisor.run("summary", command, env=self.app, timeout_s=SETTLE_S)
        self.say(f"  summary written to {out}")


def require_free(port: int) -> None:
    """Raises SupervisorError with a clear line when the web's port is taken, before anything is started."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"port {port} cannot be used: {os.strerror(error.errno or 0)}; choose another with --port"
            sys.stderr.write(message + "\n")
            raise SupervisorError(message) from error
