"""The first program on a fresh machine: what it chooses, what it says, what it refuses to remove."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bootstrap(tmp_path, monkeypatch):
    """The module, working on a project in a temporary folder."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (tmp_path / "requirements").mkdir()
    for kind, text in (("runtime", "alpha==1.0 \\\n    --hash=sha256:00\n"), ("dev", "alpha==1.0\nbeta==2.0 ; x\n")):
        (tmp_path / "requirements" / f"{kind}.txt").write_text(text)
    names = {"ROOT": tmp_path, "VENV": venv, "PYTHON": venv / "bin/python", "LOG": tmp_path / "var/log/bootstrap.log"}
    for name, path in {**names, "STAMP": venv / "stamp.json"}.items():
        monkeypatch.setattr(module, name, str(path))
    (venv / "bin/python").symlink_to(sys.executable)
    monkeypatch.delenv("FLEXBAND_PYTHON", raising=False)
    return module


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_every_lock_line_is_hashed():
    for lock in (ROOT / "requirements").glob("*.txt"):
        entries = lock.read_text().replace("\\\n", " ").splitlines()
        pins = [entry for entry in entries if entry.strip() and not entry.startswith("#")]
        assert pins
        assert all("==" in pin and "--hash=sha256:" in pin for pin in pins), lock
        assert not any("://" in pin for pin in pins), f"{lock} names an address"


def test_dev_holds_all_of_runtime_and_of_the_extra(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "ROOT", str(ROOT))
    assert bootstrap.pins("runtime") <= bootstrap.pins("tracing") <= bootstrap.pins("dev")


def test_a_second_start_does_nothing(bootstrap, monkeypatch):
    installs = []
    monkeypatch.setattr(bootstrap, "find_uv", lambda: "uv")
    monkeypatch.setattr(bootstrap, "call", lambda argv: (installs.append(argv), (0, ""))[1])
    bootstrap.ensure("dev")
    assert len(installs) == 1
    assert "--require-hashes" in installs[0]
    assert "--no-deps" in installs[0]
    bootstrap.ensure("dev")
    bootstrap.ensure("runtime")  # part of dev
    assert len(installs) == 1
    Path(bootstrap.requirements("runtime")).write_text("alpha==1.1\n")
    bootstrap.ensure("runtime")
    assert len(installs) == 2


def test_pip_is_taken_when_uv_fails(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "find_uv", lambda: "uv")
    tried = []
    monkeypatch.setattr(bootstrap, "call", lambda argv: (tried.append(argv), (int(argv[0] == "uv"), "odd"))[1])
    bootstrap.ensure("runtime")
    assert [argv[0] for argv in tried] == ["uv", bootstrap.PYTHON]
    assert "--require-hashes" in tried[1]
    assert json.loads(Path(bootstrap.STAMP).read_text()) == {"runtime": bootstrap.digest("runtime")}


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ERROR: [Errno 28] No space left on device", "the disk is full"),
        ("cause: dns error: failed to lookup", "the package index cannot be reached"),
        ("a\nHash mismatch for alpha\n", "Hash mismatch for alpha"),
    ],
)
def test_a_failed_install_is_one_clear_line_and_no_stamp(bootstrap, monkeypatch, said, line):
    monkeypatch.setattr(bootstrap, "find_uv", lambda: None)
    monkeypatch.setattr(bootstrap, "call", lambda argv: (1, said))
    with pytest.raises(bootstrap.Stop, match=line) as stopped:
        bootstrap.ensure("runtime")
    assert "\n" not in str(stopped.value)
    assert not Path(bootstrap.STAMP).exists()


def test_the_python_that_was_asked_for_is_taken_or_refused(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXBAND_PYTHON", script(tmp_path / "old", "echo 3 10"))
    with pytest.raises(bootstrap.Stop, match=r"is Python 3\.10; Python 3\.11 to 3\.14 is needed"):
        bootstrap.choose_python()
    monkeypatch.setenv("FLEXBAND_PYTHON", str(tmp_path / "none"))
    with pytest.raises(bootstrap.Stop, match="cannot be run"):
        bootstrap.choose_python()
    monkeypatch.setenv("FLEXBAND_PYTHON", good := script(tmp_path / "good", "echo 3 13"))
    assert bootstrap.choose_python() == good


def test_an_old_python3_looks_for_newer_ones(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    for number, place in (("3.9", "3.9.18"), ("3.12", "3.12.4"), ("3.13", "3.13.0")):
        program = tmp_path / "pyenv/versions" / place / "bin/python3"
        program.parent.mkdir(parents=True)
        script(program, f"echo {number.replace('.', ' ')}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bootstrap.choose_python() == str(tmp_path / "pyenv/versions/3.13.0/bin/python3")
    script(tmp_path / "python3.14", "exit 127")
    on_path = script(tmp_path / "python3.12", "echo 3 12")
    assert bootstrap.choose_python() == on_path
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "empty"))
    Path(on_path).unlink()
    with pytest.raises(bootstrap.Stop, match=r"python3 is 3\.9"):
        bootstrap.choose_python()


def build(path, seconds: str, headers: str = "True") -> str:
    """A program that answers the probe as a Python does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return script(path, f"echo {seconds}; echo {headers}")


@pytest.mark.parametrize(
    ("answers", "taken"),
    [
        ([("0.0080",)], "fast"),
        ([("0.0090",)], "own"),  # a measurement's spread is no reason
        ([("0.0080", "False")], "own"),  # agents could not be compiled with it
        ([("oops",)], "own"),
    ],
)
def test_a_much_faster_build_of_the_same_version_is_taken(bootstrap, tmp_path, monkeypatch, answers, taken):
    own = build(tmp_path / "own/python3.11", "0.0100")
    fast = build(tmp_path / "fast/python3.11", *answers[0])
    monkeypatch.setenv("PATH", f"{tmp_path}/own{os.pathsep}{tmp_path}/fast")
    monkeypatch.setattr(bootstrap, "SYSTEM_FOLDERS", ())
    assert bootstrap.fastest_build(own, "3.11") == {"own": own, "fast": fast}[taken]


def test_the_probe_measures_this_python(bootstrap):
    seconds, _ = bootstrap.probed(sys.executable)
    assert 0 < seconds < 10


def test_finds_a_rabbitmq_only_where_one_answers(bootstrap, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"amqp://guest:guest@127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("FLEXBAND_RABBITMQ_URL", url)

        def answer(greeting: bytes) -> None:
            connection, _ = server.accept()
            assert connection.recv(8) == b"AMQP\x00\x00\x09\x01"
            connection.sendall(greeting)
            connection.close()

        for greeting, found in ((b"\x01\x00\x00", url), (b"HTTP/1.1 400", None)):
            thread = threading.Thread(target=answer, args=(greeting,))
            thread.start()
            assert bootstrap.find_rabbitmq() == found
            thread.join()
    assert capsys.readouterr().out.startswith("NO RABBITMQ at 127.0.0.1:")


def test_clean_stops_the_demo_first_and_leaves_the_rest(bootstrap, tmp_path, monkeypatch):
    monkeypatch.setattr(bootstrap, "call", lambda argv: (0, ""))
    lock = tmp_path / "var/run/supervisor.lock"
    lock.parent.mkdir(parents=True)
    holder = (
        "import fcntl, os, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(os.getpid(), file=f, flush=True); print('held', flush=True); time.sleep(60)"
    )
    demo = subprocess.Popen([sys.executable, "-c", holder, str(lock)], stdout=subprocess.PIPE)
    assert demo.stdout.readline() == b"held\n"
    bootstrap.clean()
    assert demo.wait(5) == -signal.SIGTERM
    assert sorted(os.listdir(tmp_path)) == ["requirements"]
    bootstrap.clean()  # nothing there: nothing to do


def test_arguments_reach_the_program(bootstrap, monkeypatch):
    reached = []
    monkeypatch.setattr(bootstrap, "ensure", lambda kind: reached.append(kind))
    monkeypatch.setattr(bootstrap, "become", lambda arguments, environment: reached.append(arguments))
    assert bootstrap.main(["run", "demo", "--", "--headless", "--seconds", "90"]) == 0
    assert reached == ["runtime", ["manage.py", "demo", "--headless", "--seconds", "90"]]
