"""The web process in a thread, a worker in a process of its own, and a browser with people signed in."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from celery import current_app
from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection, connections
from django.test import Client
from playwright.sync_api import Browser, Page, sync_playwright

from controlplane.tenants.models import Member
from tests.web_thread import WebThread

CHROMIUM_ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
WATCH_POLICY = 'addEventListener("securitypolicyviolation", (e) => console.error("CSP " + e.violatedDirective));'
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def web() -> Iterator[str]:
    """The address of the web process while the block runs."""
    with WebThread(ws="none") as server:
        yield server.address


@contextlib.contextmanager
def worker(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A Celery worker on the test's database, broker and file store while the block runs."""
    address = urlsplit(os.environ["DATABASE_URL"])
    database = urlunsplit(address._replace(path=f"/{connection.settings_dict['NAME']}"))
    environment = {
        **os.environ, "DATABASE_URL": database, "FLEXBAND_JOB_STORAGE": settings.JOB_STORAGE,
        "CELERY_BROKER_URL": settings.CELERY_BROKER_URL, "REDIS_URL": settings.REDIS_URL,
    }  # fmt: skip
    command = [sys.executable, "-m", "celery", "-A", "controlplane.config", "worker", "--pool", "solo"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--loglevel", "INFO"], env=environment, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 60
        while b"ready" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def empty_queue() -> None:
    """Takes away what other tests rang for: their rows are gone."""
    with current_app.connection_for_write() as held:
        held.default_channel.queue_purge(settings.CELERY_TASK_DEFAULT_QUEUE)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    executable = os.environ.get("FLEXBAND_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


def session(role: str, tenant: Any = None) -> str:
    """The session key of a person with a role."""
    user = User.objects.create(username=f"{role}-person", password="!")
    Member.objects.create(user=user, role=role, tenant=tenant)
    client = Client()
    client.force_login(user)
    return client.cookies["sessionid"].value


def tab(browser: Browser, address: str, key: str, *, width: int = 1280, theme: str = "light") -> Page:
    """A signed-in tab; `page.complaints` holds what its console and its content policy said."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=theme, timezone_id="Europe/Berlin", base_url=address
    )
    context.add_cookies([{"name": "sessionid", "value": key, "url": address}])
    context.add_init_script(WATCH_POLICY)
    page = context.new_page()
    page.complaints = []  # type: ignore[attr-defined]
    page.on("console", lambda m: page.complaints.append(m.text) if m.type in ("error", "warning") else None)  # type: ignore[attr-defined]
    page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
    return page


def elsewhere(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Database work in a thread without an event loop: Playwright keeps one in the test's own."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work(*args, **options))
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert result, "the work failed"
    return result[0]
