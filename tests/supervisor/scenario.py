"""Run as a program by the tests: a supervisor with the children that a scenario asks for.

`python scenario.py VAR_DIR SCENARIO`; every line that the supervisor says goes to standard output.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from controlplane.embedded.postgres import prepare_postgres
from controlplane.embedded.valkey import prepare_valkey
from controlplane.supervisor.child import Child, RestartPolicy
from controlplane.supervisor.runlock import AlreadyRunningError
from controlplane.supervisor.servers import postgres_child, valkey_child
from controlplane.supervisor.supervisor import Supervisor, SupervisorError, exit_status, say_line

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
WITH_GRANDCHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('up', flush=True); time.sleep(600)"
)
QUICK = RestartPolicy(limit=2, backoff_s=0.05)


def python(name: str, code: str, *, ready: re.Pattern[str] | None = re.compile("^up", re.M), **more) -> Child:
    return Child(name, [sys.executable, "-c", code], ready=ready, restart=QUICK, **more)


def run(var_dir: Path, scenario: str) -> None:
    with Supervisor(var_dir) as supervisor:
        supervisor.start(python("first", SLEEPER))
        if scenario == "family":
            supervisor.start(python("agent gpu-1", WITH_GRANDCHILD), python("stubborn", STUBBORN, stop_timeout_s=1))
        elif scenario == "crash-loop":
            supervisor.start(python("web", "import sys; print('no such table: tenants'); sys.exit(3)"))
        elif scenario == "optional-crash":
            supervisor.start(python("extra", "raise SystemExit(4)", essential=False))
            say_line("went on")
            return
        elif scenario == "over":
            supervisor.start(python("agent", "print('retired'); raise SystemExit(3)", over=frozenset({3})))
            supervisor.wait(0.5)
            say_line(f"states {supervisor.states()}")
            return
        elif scenario == "port-in-use":
            code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_server(s.getsockname())"
            supervisor.start(python("web", code))
        elif scenario == "task":
            supervisor.run("migrate", [sys.executable, "-c", "print('done')"])
            supervisor.run("broken task", [sys.executable, "-c", "import sys; print('bad row 7'); sys.exit(5)"])
        elif scenario == "missing-program":
            supervisor.start(Child("ghost", ["/no/such/program"]))
        elif scenario == "never-ready":
            supervisor.start(python("slow", "import time; time.sleep(600)", ready_timeout_s=0.4))
        elif scenario == "stop-one":
            supervisor.start(python("second", SLEEPER))
            supervisor.stop("second")
            say_line(f"states {supervisor.states()}")
            return
        elif scenario == "servers":
            supervisor.start(
                postgres_child(prepare_postgres(var_dir, durable=False)), valkey_child(prepare_valkey(var_dir))
            )
        elif scenario == "timed":
            began_s = time.monotonic()
            supervisor.wait(1.0)
            say_line(f"waited {time.monotonic() - began_s:.0f} s")
            return
        say_line(f"pids {' '.join(str(pid) for pid in supervisor.pids().values())}")
        supervisor.wait()
    say_line(f"left by signal {supervisor.stopped_by_signal}")


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), sys.argv[2])
    except (SupervisorError, AlreadyRunningError) as error:
        sys.exit(exit_status(error))
