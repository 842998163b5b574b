"""An installation with nothing in it but its administrator, as real processes on servers of its own."""

from __future__ import annotations

import subprocess
from dataclasses import replace

from controlplane.demo.settings import python
from tests.chaos.job_system import ALWAYS, JobSystem

ADMINISTRATOR, PASSWORD = "ada", "a quiet harbour 17"


class EmptySystem(JobSystem):
    """Web, worker, beat and controller after `manage.py set_up`; agents are whoever enrols."""

    def start(self) -> None:
        self.supervisor.start(*(replace(each, restart=ALWAYS) for each in self._servers()))
        set_up = python(
            "manage.py", "set_up", "--name", "Harbour", "--billing-zone", "Europe/Berlin", "--administrator",
            ADMINISTRATOR,
        )  # fmt: skip
        owner = {**self.environment(as_owner=True), "FLEXBAND_ADMIN_PASSWORD": PASSWORD}
        self.supervisor.run("migrations", set_up, env=owner)
        self.supervisor.start(*self._control_plane())


def enrol(system: EmptySystem, command: str, listen: str, admin: str) -> subprocess.Popen[bytes]:
    """Runs the command as the page gave it, but for the interpreter, the folder and ports that are free here."""
    words = command.split()
    assert words[:3] == ["python", "-m", "controlplane.agent"], command
    given = dict(zip(words[3::2], words[4::2], strict=True))
    given |= {"--state-dir": str(system.var / "agent"), "--listen": listen, "--admin-listen": admin}
    argv = [*python("-m", "controlplane.agent"), *(part for pair in given.items() for part in pair)]
    log = system.folder / "agent.log"
    with log.open("wb") as out:
        return subprocess.Popen(argv, env=system.environment(), stdout=out, stderr=out)
