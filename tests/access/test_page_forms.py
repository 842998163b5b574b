"""Every form of every page with CSRF checked: refused without its token and nothing written, taken with it."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.conf import settings as project
from django.db import transaction
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from controlplane.access.provider_file import OpenIdProvider
from controlplane.ledger.models import Invoice, InvoiceLine, Period, PeriodVersion
from tests import factories
from tests.access.page_forms import TOKEN, PageForm, fingerprint, forms_of
from tests.access.test_matrix import ROUTES, address, body, world

__all__ = ["world"]

REFUSED = 403
SAYS = "The form was not taken"
#: What the page says of values that cannot be used: the form was read.
READ = {200, 302, 400, 409, 422}
#: Pages that show a form only for something that no example makes.
CLOSED, INVOICED = "2026-08", "2026-07"
MORE_PAGES = (
    "/finance/proposals/", "/policy/review/", f"/finance/periods/{CLOSED}/",
    f"/finance/reconciliation/?period={INVOICED}",
)  # fmt: skip
#: Money, and what acts at once: these are named, so that none can go missing from the walk.
NEVER_LEFT_OUT = {
    "invoices", "invoice", "invoice-upload", "period", "variance-propose", "proposals", "proposal-decide", "pool-sku",
    "planned-rate", "exports", "cost-rate-new", "rate-card-new", "budget-new", "budget-edit", "key-rotate",
    "act-suspend", "act-drain", "flex-freeze", "flex-recall", "agent-retire", "job-cancel", "member-new", "login",
    "logout", "invitation-new", "invitation", "token-new", "mfa_activate_totp", "account_reauthenticate",
    "openid_connect_login",
}  # fmt: skip
#: These stand in no page of the product.
NOT_OURS = {"web/styleguide.html"}
#: These stand in the middle of signing in, need a passkey or rows that were selected: `test_factors.py`,
#: `test_sign_in_walk.py` and `tests/tenants/test_bulk_*.py` send them.
ELSEWHERE = {
    "access/second_factor.html", "access/confirm_passkey.html", "access/passkey_add.html",
    "tenants/bulk_values.html", "tenants/bulk_review.html", "tenants/bulk_results.html",
}  # fmt: skip
PROVIDER = OpenIdProvider("work", "Work account", "https://10.0.0.1", "flexband", "secret")
#: The form was read, and the address of the provider refused.
NO_PROVIDER = {"openid_connect_login": {502}}


def strict(client: Client) -> Client:
    """The same person with a client that checks tokens as a server does."""
    found = Client(enforce_csrf_checks=True, raise_request_exception=False)
    found.cookies = client.cookies
    return found


@pytest.fixture
def pages(world) -> list[str]:
    """Addresses of all pages, everything that they need being there."""
    closed = Period.objects.create(name=CLOSED, state="closed", version=1)
    PeriodVersion.objects.create(
        period=closed, version=1, closed_at=factories.NOW, closed_by="ada", checklist=[], fingerprint="", cost_nanos=0,
        charge_nanos=0,
    )  # fmt: skip
    invoice = Invoice.objects.create(
        period=INVOICED, file_name="july.csv", file_sha256="1" * 64, format="focus", currency="EUR", lines_count=1,
        imported_at=timezone.now(), imported_by="ada",
    )  # fmt: skip
    InvoiceLine.objects.create(invoice=invoice, line=2, billed=19, category="tax", day=f"{INVOICED}-02")
    found = [address(route, "acme") for route in ROUTES if not route.rest and "get" in route.needs]
    return [*filter(None, found), *MORE_PAGES]


def walk(client: Client, pages: list[str]) -> tuple[dict[tuple, PageForm], set[str]]:
    """One form of each kind, and the templates that were rendered on the way."""
    forms: dict[tuple, PageForm] = {}
    templates: set[str] = set()
    for url in pages:
        response = client.get(url)
        if response.status_code == 200 and "text/html" in response.get("Content-Type", ""):
            templates |= {template.name for template in response.templates if template.name}
            for form in forms_of(url, body(response)):
                forms.setdefault(form.key(), form)
    return forms, templates


def send(client: Client, form: PageForm, given: dict[str, str]) -> HttpResponse:
    return client.post(form.action, given, headers={"accept": "text/html"})


def taken(client: Client, form: PageForm, given: dict[str, str]) -> HttpResponse:
    """The answer to a form with its token; what it wrote is taken back, so that the next one finds the same world."""
    cookies = client.cookies.copy()
    with transaction.atomic():
        response = send(client, form, {**given, TOKEN: form.token})
        body(response)
        transaction.set_rollback(True)
    client.cookies = cookies
    return response


def posting_templates() -> Iterator[str]:
    root = Path(project.BASE_DIR) / "templates"
    for path in root.rglob("*.html"):
        if 'method="post"' in path.read_text():
            yield str(path.relative_to(root))


def just_confirmed(client: Client) -> None:
    """As after the page that asks for the password once more."""
    session = client.session
    user = session["_auth_user_id"]
    session["account_authentication_methods"] = [{"method": "password", "at": time.time(), "reauthenticated": True}]
    session["account_authentication_methods_user"] = user
    session.save()


def test_every_form_needs_its_token_and_works_with_it(world, pages, settings, capsys):
    settings.OPENID_PROVIDERS = (PROVIDER,)
    client = strict(world["admin"])
    just_confirmed(client)
    forms, templates = walk(client, pages)
    assert {key[0] for key in forms} >= NEVER_LEFT_OUT, NEVER_LEFT_OUT - {key[0] for key in forms}
    assert [form.page for form in forms.values() if not form.token] == [], "a form without a token"

    before, statuses, wrong = fingerprint(), Counter(), []
    for key, form in forms.items():
        for given in form.variants():
            without = send(client, form, given)
            if without.status_code != REFUSED or SAYS not in body(without):
                wrong.append((key[0], form.page, "without its token", without.status_code))
    assert wrong == []
    assert fingerprint() == before, "a form without its token wrote something"

    for key, form in forms.items():
        for given in form.variants():
            response = taken(client, form, given)
            statuses[response.status_code] += 1
            templates |= {template.name for template in response.templates or () if template.name}
            if response.status_code not in READ | NO_PROVIDER.get(key[0], set()):
                wrong.append((key[0], form.page, "with its token", response.status_code))
            for found in forms_of(form.action, body(response)) if response.status_code == 200 else ():
                assert found.token, f"the answer of {form.action} has a form without a token"
    assert wrong == []
    assert fingerprint() == before
    assert set(posting_templates()) - templates - NOT_OURS - ELSEWHERE == set(), "no page with these forms was opened"
    worked = statuses[200] + statuses[302]
    with capsys.disabled():
        print(f"\n  {len(forms)} forms, {statuses.total()} buttons; with their token {dict(statuses)}")
    assert worked * 2 > statuses.total()


def test_the_answer_to_a_form_without_its_token_says_what_happened_and_what_to_do(world):
    client = strict(world["admin"])
    text = body(client.post("/finance/exports/", {"period": "2026-10"}, headers={"accept": "text/html"}))
    assert SAYS in text and "Nothing was changed" in text and "reload the page" in text
    assert "role" not in text.split("<main")[1], "nobody's role is at fault"
    signed_out = Client(enforce_csrf_checks=True)
    text = body(signed_out.post("/sign-in/", {"username": "x"}, headers={"accept": "text/html"}))
    assert SAYS in text and "Sign in" in text
