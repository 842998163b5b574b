#!/usr/bin/env python3
"""Makes the environment from the hashed lock files and runs a command in it. Standard library only.

    python3 bootstrap.py run demo|test|bench|chaos|compile|lint [-- arguments]
    python3 bootstrap.py env runtime|dev
    python3 bootstrap.py clean

It is the first thing that runs on a fresh machine, so it must parse on any Python 3 to say which one is needed.
"""

import argparse
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".flexband-requirements.json")
LOG = os.path.join(ROOT, "var", "log", "bootstrap.log")
PYTHON_MIN = (3, 11)
PYTHON_END = (3, 15)
INSTALL_TIMEOUT_S = 1800
RABBITMQ_DEFAULT = "amqp://guest:guest@127.0.0.1:5672"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

DISK_FULL = ("no space left on device", "disk quota exceeded")
NO_NETWORK = (
    "name or service not known",
    "temporary failure in name resolution",
    "failed to resolve",
    "dns error",
    "network is unreachable",
    "connection refused",
    "connection error",
    "error sending request",
    "failed to fetch",
    "timed out",
    "no matching distribution found",
)


class Stop(Exception):
    """There is no going on; the message is one clear line."""


def say(line):
    """Print a line of progress."""
    print(line, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Which Python


def version_of(program):
    """(major, minor) of a Python program; None when it cannot be run."""
    code = "import sys; print(*sys.version_info[:2])"
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        answer = subprocess.run(
            [program, "-I", "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=True,
            cwd="/",
        )
        major, minor = answer.stdout.split()
        return int(major), int(minor)
    return None


def dotted(version):
    """A version as people write it."""
    return ".".join(map(str, version))


def fits(version):
    """True for a version that the project runs on."""
    return version is not None and PYTHON_MIN <= version < PYTHON_END


def candidates():
    """Programs to try after the running one, best first."""
    for minor in range(PYTHON_END[1] - 1, PYTHON_MIN[1] - 1, -1):
        program = shutil.which(f"python3.{minor}")
        if program:
            yield program
    folder = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = glob.glob(os.path.join(folder, "versions", "3.*", "bin", "python3"))
    yield from sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.split("versions")[1])])[::-1]


def choose_python():
    """The Python to make the environment with."""
    asked = os.environ.get("FLEXBAND_PYTHON")
    if asked:
        version = version_of(asked)
        if not fits(version):
            have = "cannot be run" if version is None else "is Python " + dotted(version)
            raise Stop(f"FLEXBAND_PYTHON ({asked}) {have}; Python 3.11 to 3.14 is needed")
        return asked
    if fits(tuple(sys.version_info[:2])):
        return fastest_build(sys.executable, dotted(sys.version_info[:2]))
    for program in candidates():
        if fits(version_of(program)):
            return program
    raise Stop(
        f"Python 3.11 to 3.14 is needed and python3 is {dotted(sys.version_info[:2])}: install one (for example with "
        "your system's packages, pyenv or uv) or set FLEXBAND_PYTHON to its program"
    )


# Builds of one version differ: one without profile-guided optimisation, as pyenv makes by default, takes half as long
# again for the same work. The probe says how long a loop takes and whether environments and extensions can be made.
PROBE = """
import ensurepip, os, sysconfig, time, venv
class Counter:
    def __init__(self): self.total = 0
    def add(self, n): self.total += n
def work():
    began = time.perf_counter()
    counter, seen = Counter(), {}
    for i in range(20000):
        counter.add(i)
        seen[i & 63] = f"{i}"
    return time.perf_counter() - began
print(min(work() for _ in range(15)))
print(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
"""
MUCH_FASTER = 0.85
SYSTEM_FOLDERS = ("/usr/local/bin", "/usr/bin")


def probed(program):
    """(seconds, True with C headers) of a Python program; None when it cannot make an environment."""
    status, text = call([program, "-I", "-c", PROBE])
    with contextlib.suppress(ValueError):
        seconds, headers = text.split()
        return (float(seconds), headers == "True") if status == 0 else None
    return None


def fastest_build(program, version):
    """`program`, or another build of its version on this machine that is much faster and lacks nothing."""
    folders = dict.fromkeys([*os.environ.get("PATH", os.defpath).split(os.pathsep), *SYSTEM_FOLDERS])
    others = [os.path.join(folder, f"python{version}") for folder in folders]
    others = [other for other in others if os.access(other, os.X_OK)]
    best, best_s = program, None
    with Step("choosing a Python"):
        own = probed(program) if others else None
        for other in others if own else ():
            found = None if os.path.realpath(other) == os.path.realpath(best) else probed(other)
            if found and found[0] < (best_s or own[0] * MUCH_FASTER) and found[1] >= own[1]:
                best, best_s = other, found[0]
    return best


# ---------------------------------------------------------------------------------------------------------------------
# The environment


def requirements(kind):
    """Path of the lock file `kind`."""
    return os.path.join(ROOT, "requirements", kind + ".txt")


def digest(kind):
    """Digest of the lock file `kind`."""
    with open(requirements(kind), "rb") as handle:
        return hashlib.sha256(handle.read()).hexdigest()


def pins(kind):
    """The pinned versions in a lock file."""
    with open(requirements(kind)) as handle:
        return set(re.findall(r"^([A-Za-z0-9_.-]+==[^\s\\;]+)", handle.read(), re.MULTILINE))


def stamp():
    """What was installed into the environment: kind to digest; empty when nothing is known."""
    with contextlib.suppress(OSError, ValueError), open(STAMP) as handle:
        return dict(json.load(handle))
    return {}


def ensure(kind):
    """Make the environment hold what the lock file `kind` says; instant when it does."""
    if stamp().get(kind) == digest(kind) and os.access(PYTHON, os.X_OK):
        return
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp().get(kind) != digest(kind) or not os.access(PYTHON, os.X_OK):
            os.makedirs(os.path.dirname(LOG), exist_ok=True)
            make_venv()
            install(kind)
    except OSError as error:
        raise Stop(f"cannot make {VENV}: {error.strerror or error}") from error
    finally:
        os.close(lock)


def make_venv():
    """Make .venv with a fitting Python, unless there is one that works."""
    if fits(version_of(PYTHON)):
        return
    python = choose_python()
    version = dotted(version_of(python))
    with Step(f"making .venv with Python {version}"):
        status, text = call([python, "-m", "venv", "--clear", VENV])
        if status and shutil.which("uv"):
            status, text = call(["uv", "venv", "--clear", "--seed", "--python", python, VENV])
    if status:
        if "ensurepip" in text:
            raise Stop(
                "this Python cannot make environments: install its venv package (Debian and Ubuntu: apt install "
                f"python{version}-venv) or install uv"
            )
        raise failure("making .venv", text)


def install(kind):
    """Install the lock file `kind`: with uv when it is there or can be had, else with pip."""
    needed = len(pins(kind))
    uv = find_uv()
    status, text = 1, ""
    if uv:
        with Step(f"installing {needed} packages with uv"):
            options = ["--python", PYTHON, "--require-hashes", "--no-deps", "--compile-bytecode", "--quiet"]
            status, text = call([uv, "pip", "install", *options, "-r", requirements(kind)])
        if status and any(sign in text.lower() for sign in DISK_FULL):
            raise failure("installing packages", text)
    if status:
        with Step(f"installing {needed} packages with pip"):
            options = ["--require-hashes", "--no-deps", "--disable-pip-version-check", "--quiet"]
            status, text = call([PYTHON, "-m", "pip", "install", *options, "-r", requirements(kind)])
    if status:
        raise failure("installing packages", text)
    installed = {kind: digest(kind)}
    if kind == "dev" and pins("runtime") <= pins("dev"):
        installed["runtime"] = digest("runtime")
    elif kind == "runtime" and stamp().get("dev") == digest("dev"):
        installed["dev"] = digest("dev")
    with open(STAMP + ".new", "w") as handle:
        json.dump(installed, handle)
    os.replace(STAMP + ".new", STAMP)


def find_uv():
    """uv's program: on PATH, in the environment, or installed there now; None when it cannot be had."""
    own = os.path.join(VENV, "bin", "uv")
    for program in (shutil.which("uv"), own):
        if program and os.access(program, os.X_OK) and call([program, "--version"])[0] == 0:
            return program
    with Step("getting the installer uv"):
        options = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet"]
        status, _ = call([PYTHON, "-m", "pip", "install", *options, "-r", requirements("installer")])
    return own if status == 0 and os.access(own, os.X_OK) else None


def call(argv):
    """Run a program quietly: (status, what it said). What it said is kept in the log."""
    environment = dict(os.environ, PIP_NO_INPUT="1", PIP_ROOT_USER_ACTION="ignore")
    environment.pop("VIRTUAL_ENV", None)
    try:
        answer = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_TIMEOUT_S,
            env=environment,
            cwd=ROOT,
            check=False,
        )
        status, text = answer.returncode, answer.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired:
        status, text = 1, f"timed out after {INSTALL_TIMEOUT_S} s"
    except OSError as error:
        status, text = 127, str(error)
    with contextlib.suppress(OSError), open(LOG, "a") as log:
        log.write(f"$ {' '.join(argv)}\n{text}\nstatus {status}\n")
    return status, text


def failure(doing, text):
    """The one line that explains why `doing` failed, from what the program said."""
    lower = text.lower()
    if any(sign in lower for sign in DISK_FULL):
        return Stop(f"{doing} failed: the disk is full; about 1 GB is needed under {ROOT}")
    if any(sign in lower for sign in NO_NETWORK):
        return Stop(
            f"{doing} failed: the package index cannot be reached, or lacks a package; check the network, or set "
            f"UV_DEFAULT_INDEX and PIP_INDEX_URL to an index that can be reached (details in {LOG})"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return Stop(f"{doing} failed: {lines[-1] if lines else 'no message'} (details in {LOG})")


class Step:
    """Says what takes long: at the start when it lasts a second, and at the end with the time."""

    def __init__(self, what):
        self.what = what

    def __enter__(self):
        self.began_s = time.monotonic()
        self.timer = threading.Timer(1.0, say, [f"{self.what} ..."])
        self.timer.daemon = True
        self.timer.start()
        return self

    def __exit__(self, kind, error, trace):
        self.timer.cancel()
        took_s = time.monotonic() - self.began_s
        if took_s >= 1.0 and kind is None:
            say(f"{self.what}: {took_s:.1f} s")


# ---------------------------------------------------------------------------------------------------------------------
# What the tests look for on the machine


def find_chromium():
    """A browser for the tests: on PATH, or installed now when that is allowed; None after saying how to get one."""
    asked = os.environ.get("FLEXBAND_CHROMIUM")
    if asked:
        return asked
    found = chromium_on_path()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with Step("installing chromium with apt-get"):
            call(["apt-get", "update", "-q"])
            call(["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-q", "chromium"])
        found = chromium_on_path()
    if found is None:
        say(
            "NO CHROMIUM: the browser tests cannot run. Install it (apt install chromium, dnf install chromium, "
            "brew install --cask chromium) or set FLEXBAND_CHROMIUM to its program."
        )
    return found


def chromium_on_path():
    """The first browser on PATH that starts; None when there is none."""
    for name in CHROMIUMS:
        program = shutil.which(name)
        if program and call([program, "--version"])[0] == 0:
            return program
    return None


def find_rabbitmq():
    """The address of a RabbitMQ that answers; None after saying so loudly."""
    url = os.environ.get("FLEXBAND_RABBITMQ_URL", RABBITMQ_DEFAULT)
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 5672)
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=2) as connection:
        connection.sendall(b"AMQP\x00\x00\x09\x01")
        if connection.recv(1) == b"\x01":  # a method frame: connection.start
            return url
    say(
        f"NO RABBITMQ at {address[0]}:{address[1]}: its tests are left out of this run. "
        "Start one, or set FLEXBAND_RABBITMQ_URL."
    )
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def run_demo(arguments):
    """Become the demo."""
    ensure("runtime")
    become(["manage.py", "demo", *arguments], {})


def run_test(arguments):
    """Become the test suite."""
    ensure("dev")
    found = {"FLEXBAND_CHROMIUM": find_chromium(), "FLEXBAND_RABBITMQ_URL": find_rabbitmq()}
    # A choice of tests is one run of pytest; the whole suite is the passes of tests/__main__.py.
    runner = ["-m", "pytest", *arguments] if arguments else ["-m", "tests"]
    become(runner, {name: value for name, value in found.items() if value})


def run_bench(arguments):
    """Become the measurements."""
    ensure("dev")
    become(["-m", "benchmarks", *arguments], {})


def run_chaos(arguments):
    """Become the many kills."""
    ensure("dev")
    become(["-m", "tests.chaos", *arguments], {})


def run_compile(arguments):
    """Compile what a request passes in an agent; says what is needed where it cannot."""
    ensure("dev")
    become(["-m", "controlplane.compiled", *arguments], {})


def run_lint(arguments):
    """Run every check of the source, all of them even when one fails; exit 1 when one did."""
    ensure("dev")
    failed = []
    binaries = os.path.join(VENV, "bin")
    checks = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy", "controlplane"), ("lint-imports",))
    for check in checks:
        say("$ " + " ".join(check))
        if subprocess.call([os.path.join(binaries, check[0]), *check[1:]], cwd=ROOT):
            failed.append(check[0])
    if failed:
        raise Stop("failed: " + ", ".join(failed))


def become(arguments, environment):
    """Replace this process by the environment's Python, so that signals and the exit status are the program's own."""
    os.chdir(ROOT)
    path = os.pathsep.join([os.path.join(VENV, "bin"), os.environ.get("PATH", os.defpath)])
    os.execve(PYTHON, [PYTHON, *arguments], dict(os.environ, PATH=path, VIRTUAL_ENV=VENV, **environment))


def clean():
    """Stop what runs on var/, then remove var/, compiled/ and .venv."""
    var = os.path.join(ROOT, "var")
    stop_supervisor(os.path.join(var, "run", "supervisor.lock"))
    if os.access(PYTHON, os.X_OK) and os.path.isdir(var):
        status, text = call([PYTHON, "-m", "controlplane.embedded", "remove", var])
        if status:
            raise Stop(f"cannot stop the servers of {var}: {text.strip()}")
    for folder in (var, os.path.join(ROOT, "compiled"), VENV):
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.exists(folder):
            raise Stop(f"cannot remove {folder}; is it owned by another user?")


def stop_supervisor(path):
    """Stop a running demo and wait until it has stopped everything of its own."""
    try:
        lock = os.open(path, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            pid = int(os.read(lock, 32))
            say(f"stopping the demo (pid {pid})")
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.2)
        raise Stop("the demo did not stop within 90 s; nothing was removed") from None
    finally:
        os.close(lock)


RUNS = {
    "demo": run_demo,
    "test": run_test,
    "bench": run_bench,
    "chaos": run_chaos,
    "compile": run_compile,
    "lint": run_lint,
}


def main(arguments):
    """Carry out the command of `arguments`; the exit status."""
    parser = argparse.ArgumentParser(prog="bootstrap.py", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", metavar="run|env|clean")
    commands.required = True
    run = commands.add_parser("run", help="make the environment and run something in it")
    run.add_argument("what", choices=sorted(RUNS))
    run.add_argument("rest", nargs=argparse.REMAINDER, help="-- and arguments for what is run")
    env = commands.add_parser("env", help="make the environment")
    env.add_argument("kind", choices=["runtime", "dev"])
    commands.add_parser("clean", help="stop the demo and remove var/ and .venv")
    options = parser.parse_args(arguments)
    try:
        if options.command == "run":
            RUNS[options.what](options.rest[1:] if options.rest[:1] == ["--"] else options.rest)
        elif options.command == "env":
            ensure(options.kind)
        else:
            clean()
    except Stop as stop:
        print(f"flexband: {stop}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
