"""A browser on the web process under `localhost` (passkeys know no addresses in figures), and codes as a phone makes
them. `PICTURES=/some/folder` keeps a picture of each page that a walk asks for.
"""

import base64
import hmac
import os
import struct
import time
from contextlib import contextmanager
from pathlib import Path

from django.contrib.auth.models import User

from controlplane.tenants.models import Member
from tests import factories
from tests.jobs.page_site import WATCH_POLICY, elsewhere

PASSWORD = "correct horse battery"


def person(name, role="viewer", tenant=None):
    user = User.objects.create(username=name, email=f"{name}@example.com", password=factories.password_hash())
    Member.objects.create(user=user, role=role, tenant=tenant)
    return user


@contextmanager
def visitor(browser, address, **options):
    """A page of nobody; what its console or content policy complains of fails the walk at its end."""
    context = browser.new_context(
        viewport={"width": 1280, "height": 900}, base_url=address.replace("127.0.0.1", "localhost"), **options
    )
    context.add_init_script(WATCH_POLICY)
    page = context.new_page()
    page.set_default_timeout(60_000)
    complaints = []
    page.on("console", lambda m: complaints.append(m.text) if "CSP" in m.text or m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    # The browser itself notes answers that are meant, such as a wrong code's 400.
    left = [text for text in complaints if "the server responded with a status of" not in text]
    assert left == [], left


def sign_in(page, name, password=PASSWORD):
    page.goto("/sign-in/?next=/account/")
    page.fill("[name=username]", name)
    page.fill("[name=password]", password)
    page.click("button:has-text('Sign in'):not(.wide)")


def sign_out(page):
    page.goto("/account/")
    page.click("summary[aria-label^='Account of']")
    page.click("button:has-text('Sign out')")
    page.wait_for_url("**/sign-in/")


def confirm(page, password=PASSWORD):
    page.fill("[name=password]", password)
    page.click("button:has-text('Confirm')")


def code_of(secret, steps=0):
    """Six digits of a secret in base 32 (RFC 6238), `steps` of 30 s from now; nothing of the library is used."""
    counter = struct.pack(">Q", int(time.time()) // 30 + steps)
    digest = hmac.new(base64.b32decode(secret), counter, "sha1").digest()
    at = digest[-1] & 0xF
    return f"{(struct.unpack('>I', digest[at : at + 4])[0] & 0x7FFFFFFF) % 1_000_000:06}"


def picture(page, name):
    if folder := os.environ.get("PICTURES"):
        for scheme in ("light", "dark"):
            for width in (1280, 390):
                page.emulate_media(color_scheme=scheme)
                page.set_viewport_size({"width": width, "height": 900})
                page.screenshot(path=str(Path(folder) / f"access-{name}-{scheme}-{width}.png"), full_page=True)
        page.emulate_media(color_scheme="light")
        page.set_viewport_size({"width": 1280, "height": 900})


__all__ = ["code_of", "confirm", "elsewhere", "person", "picture", "sign_in", "sign_out", "visitor"]
