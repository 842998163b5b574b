"""Every address with every role: what the table allows is opened, everything else is refused, and nobody reads a
stranger's data.
"""

from collections import Counter

import pytest
from django.urls import NoReverseMatch, reverse

from controlplane.tenants.roles import PERMISSIONS, Role, allows
from tests.access.examples import MARK, OWNED, budget, key, maker, tenant
from tests.access.routes import Route, routes
from tests.bodies import body_of

ROUTES = routes()
STAFF = [role.value for role in Role if role != Role.TENANT]
PEOPLE = [*STAFF, "tenant", "stranger", "anonymous"]
ROLE_OF = {**{role: role for role in STAFF}, "tenant": "tenant", "stranger": "tenant", "anonymous": None}
BAD_METHOD = 405


def label(route: Route) -> str:
    return f"{route.name or '(no name)'} {route.path}"


def address(route: Route, owner: str) -> str | None:
    """The address with an owner's objects in it, or None where an argument has no example."""
    values = {}
    for argument in dict.fromkeys(route.arguments):
        make = maker(route.path, argument)
        if make is None:
            return None
        values[argument] = make(owner)
    try:
        return reverse(route.name, kwargs=values)
    except NoReverseMatch:
        return None


def test_every_address_says_what_it_needs():
    silent = [label(route) for route in ROUTES if not route.marked]
    assert not silent, f"guard these with @requires or mark them @public (REST: read_permission): {silent}"


def test_every_permission_is_in_the_table():
    unknown = {
        (label(route), permission)
        for route in ROUTES
        for permission in route.needs.values()
        if permission is not None and permission not in PERMISSIONS
    }
    assert not unknown


def test_every_address_has_a_name():
    assert not [route.path for route in ROUTES if not route.name]


def test_every_argument_has_an_example():
    missing = sorted(
        {
            (route.path, argument)
            for route in ROUTES
            if "get" in route.needs and not route.public
            for argument in route.arguments
            if maker(route.path, argument) is None
        }
    )
    assert not missing, f"add these to tests/access/examples.py: {missing}"


@pytest.fixture
def world(people, settings, tmp_path):
    settings.JOB_STORAGE = str(tmp_path / "files")
    for owner in ("acme", "stranger"):
        tenant(owner)
        key(owner)
        budget(owner)
    for client in people.values():
        client.raise_request_exception = False  # a page that fails is one wrong cell, not the end of the matrix
    return people


def expected(person: str, route: Route, permission: str | None, owner: str) -> set[int]:
    """The statuses that the table allows for a person who opens an object of `owner`."""
    if permission is None:
        return {200, 302, 400, 401, 404}
    if person == "anonymous":
        return {401, 403} if route.rest else {302}
    if not allows(ROLE_OF[person], permission):
        return {403}
    owned = any(route.path.replace("^", "").startswith(start) for start in OWNED) and route.arguments
    own = {"tenant": "acme", "stranger": "stranger"}.get(person)
    if owned and own is not None and own != owner:
        return {404}
    return {200, 302}


def body(response) -> str:
    return body_of(response).decode("utf-8", "replace")


@pytest.mark.parametrize("person", PEOPLE)
def test_reading(person, world, capsys):
    wrong, leaks, seen = [], [], Counter()
    client = world[person]
    for route in ROUTES:
        if "get" not in route.needs:
            continue
        for owner in ("acme", "stranger") if route.arguments else ("acme",):
            url = address(route, owner)
            if url is None:
                seen["without example"] += 1
                continue
            response = client.get(url)
            seen["requests"] += 1
            text = body(response)
            if response.status_code == BAD_METHOD:
                continue
            if response.status_code not in expected(person, route, route.needs["get"], owner):
                wrong.append((label(route), owner, response.status_code))
            if person == "anonymous" and not route.rest and not route.public and "/sign-in/" not in response.url:
                wrong.append((label(route), owner, "not sent to sign in"))
            foreign = {"tenant": ["stranger"], "stranger": ["acme"], "anonymous": ["acme", "stranger"]}.get(person, [])
            leaks += [(label(route), other) for other in foreign if MARK[other] in text]
    with capsys.disabled():
        print(
            f"\n  {person}: {len(ROUTES)} addresses, {seen['requests']} opened, "
            f"{seen['without example']} without example"
        )
    assert not wrong
    assert not leaks


@pytest.mark.parametrize("person", PEOPLE)
def test_writing_is_refused_to_who_may_not(person, world):
    """Only refused writes are sent: they change nothing, so every address can be tried."""
    wrong, tried = [], 0
    for route in ROUTES:
        for method, permission in route.needs.items():
            if method == "get" or permission is None or allows(ROLE_OF[person], permission):
                continue
            url = address(route, "acme")
            if url is None:
                continue
            response = (
                getattr(world[person], method)(url, {}, content_type="application/json")
                if route.rest
                else (world[person].post(url, {}))
            )
            tried += 1
            sent_to_sign_in = response.status_code == 302 and "/sign-in/" in response.url
            refused = response.status_code in (401, 403) or (person == "anonymous" and sent_to_sign_in)
            if not refused:
                wrong.append((label(route), method, response.status_code))
    assert not wrong
    assert tried or person == "admin"


@pytest.mark.parametrize("person,owner", [("tenant", "stranger"), ("stranger", "acme")])
def test_a_strangers_object_and_no_object_look_the_same(person, owner, world):
    for url, missing in (
        (f"/tenants/{owner}/", "/tenants/nobody/"),
        (f"/api/v1/tenants/{owner}/", "/api/v1/tenants/nobody/"),
        (f"/api/v1/api-keys/{key(owner)}/", "/api/v1/api-keys/key_000000000000/"),
        (f"/api/v1/budgets/{budget(owner)}/", "/api/v1/budgets/99999999/"),
    ):
        theirs, none = world[person].get(url), world[person].get(missing)
        assert (theirs.status_code, none.status_code) == (404, 404)
        if "/api/" in url:
            assert theirs.json() == none.json()


def test_the_matrix_is_not_empty(capsys):
    guarded = [route for route in ROUTES if not route.public]
    cells = sum(len(route.needs) for route in ROUTES) * len(PEOPLE)
    with capsys.disabled():
        print(
            f"\n  access matrix: {len(ROUTES)} addresses ({len(guarded)} guarded) x {len(PEOPLE)} people, "
            f"{cells} cells by method"
        )
    assert len(guarded) > 30
