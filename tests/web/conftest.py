"""A real Chromium against the real pages, served without a database."""

import shutil
import threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import pytest
from django.core.wsgi import get_wsgi_application
from django.test import override_settings
from playwright.sync_api import sync_playwright

CHROMIUM_ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format, *args):
        pass


class ThreadedServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def site():
    """Base address of the web app's own pages; DEBUG opens the style guide without signing in."""
    with override_settings(DEBUG=True, ROOT_URLCONF="tests.web.browser_urls", SHELL_CONTEXT=None):
        server = make_server("127.0.0.1", 0, get_wsgi_application(), ThreadedServer, QuietHandler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def chromium():
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium, site):
    """open_page(path, width=, theme=, **context options) -> page; `page.complaints` holds console errors."""
    contexts = []

    def visit(path="/styleguide/", *, width=1280, theme="light", **options):
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, timezone_id="Europe/Berlin", **options
        )
        contexts.append(context)
        page = context.new_page()
        page.complaints = []
        page.on("console", lambda m: page.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(site + path)
        return page

    yield visit
    for context in contexts:
        context.close()
