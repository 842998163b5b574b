"""What tests of the whole REST interface ask about: a row of every noun, and an administrator's token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DatabaseError, transaction
from django.utils import timezone

from controlplane.access.token_actions import allowed_to, create_token
from controlplane.audit.actors import Actor
from controlplane.tenants.models import Member, Tenant
from tests import factories
from tests.access import examples


class World:
    """Rows that every part of a test finds as they were made: what a part did is taken back before the next."""

    def __init__(self) -> None:
        factories.installation()
        self.people = factories.people()
        for make in dict.fromkeys(examples.ARGUMENTS.values()):
            make("acme")
        Tenant.objects.filter(slug="acme").update(classes=["chat", "bulk"])
        user = Member.objects.get(user__username="admin").user
        issued = create_token(
            user_id=user.pk, name="tests", permissions=allowed_to("admin"), days=1,
            actor=Actor(user.pk, "admin", "admin"), now=timezone.now(),
        )  # fmt: skip
        self.headers = {"Authorization": f"Bearer {issued.secret}"}
        self.part, self.savepoint = "", transaction.savepoint()

    def begin(self, part: str) -> None:
        if part != self.part:
            transaction.savepoint_rollback(self.savepoint)
            self.part, self.savepoint = part, transaction.savepoint()

    @contextmanager
    def one_request(self) -> Iterator[None]:
        """A statement that the database refused spoils this request, not those behind it."""
        before = transaction.savepoint()
        yield
        try:
            transaction.savepoint_commit(before)
        except DatabaseError:
            transaction.savepoint_rollback(before)


def named(document: dict[str, Any]) -> dict[str, Any]:
    """The description with the names of rows that exist beside whatever else a value may be."""
    for path, methods in document["paths"].items():
        for operation in methods.values():
            for parameter in operation.get("parameters", ()):
                known = value_of(path, parameter)
                if known is not None:
                    parameter["schema"] = {"anyOf": [{"enum": [known]}, parameter["schema"]]}
    for schema in document["components"]["schemas"].values():
        for name, value in schema.get("properties", {}).items():
            if name in VALUES and "string" in value.get("type", ()) and "enum" not in value:
                schema["properties"][name] = {"anyOf": [{"enum": [VALUES[name]]}, value]}
            elif name == "classes" and value.get("type") == "array":
                value["items"] = {"anyOf": [{"enum": ["chat"]}, value["items"]]}
    return document


VALUES = {
    "tenant": "acme", "pool": "chat-70b", "workload_class": "chat", "class": "bulk", "default_class": "chat",
    "model": "llama-70b", "parent": "stranger", "downgrade_to": "bulk", "contract": "acme-promise", "period": "2026-10",
}  # fmt: skip


def value_of(path: str, parameter: dict[str, Any]) -> Any:
    name = parameter["name"]
    if name == "If-Match":
        return "*"
    if parameter["in"] == "query":
        return VALUES.get(name)
    make = examples.maker(path.lstrip("/"), name) or examples.maker(path.lstrip("/"), "pk")
    if parameter["in"] != "path" or make is None:
        return None
    value = make("acme")
    return value if isinstance(value, int) else str(value)
