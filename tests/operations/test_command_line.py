"""What commands say of arguments that they cannot use: one line, exit status 2."""

import os
import socket
import subprocess

import pytest

from controlplane.demo.settings import python
from tests.e2e.demo_run import ROOT


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--agents", "many"], "argument --agents: invalid int value: 'many'"),
        (["slo"], "the following arguments are required: --contract"),
        (["policy", "diff", "1"], "the following arguments are required: b"),
    ],
)
def test_a_mistake_has_one_line(arguments, said):
    done = subprocess.run(python("manage.py", *arguments), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_database_that_cannot_be_reached_has_one_line():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environment = {**os.environ, "DATABASE_URL": f"postgresql://flexband@127.0.0.1:{closed.getsockname()[1]}/none"}
        done = subprocess.run(
            python("manage.py", "audit", "verify"),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "the database cannot be reached" in line and "manage.py doctor" in line


def test_help_still_shows_how_a_command_is_used():
    done = subprocess.run(python("manage.py", "slo", "--help"), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("usage: manage.py slo")
