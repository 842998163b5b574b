"""The one table of who may do what. Pages, REST and sockets ask it; a test tries every route with every role.

A permission is `noun.verb`. `read` permissions of a tenant member reach their own tenant only: the doors in
`tenants.queries` see to that.
"""

from enum import StrEnum


class Role(StrEnum):
    ADMIN = "admin"
    FINANCE = "finance"
    ONCALL = "oncall"
    VIEWER = "viewer"
    TENANT = "tenant"


STAFF = frozenset({Role.ADMIN, Role.FINANCE, Role.ONCALL, Role.VIEWER})
EVERYONE = STAFF | {Role.TENANT}
ADMIN = frozenset({Role.ADMIN})
MONEY = frozenset({Role.ADMIN, Role.FINANCE})
RESPONDERS = frozenset({Role.ADMIN, Role.ONCALL})

PERMISSIONS: dict[str, frozenset[Role]] = {
    "home.read": EVERYONE,
    "live.read": STAFF,
    "own.read": EVERYONE,
    "own.write": EVERYONE,
    "tenant.read": EVERYONE,
    "tenant.write": ADMIN,
    "tenant.suspend": RESPONDERS,
    "member.read": ADMIN,
    "member.write": ADMIN,
    "key.read": EVERYONE,
    "key.write": ADMIN,
    "budget.read": EVERYONE,
    "budget.write": MONEY,
    "class.read": STAFF,
    "class.write": ADMIN,
    "class.suspend": RESPONDERS,
    "contract.read": EVERYONE,
    "contract.write": ADMIN,
    "pool.read": STAFF,
    "pool.write": ADMIN,
    "agent.read": STAFF,
    "agent.enrol": ADMIN,
    "agent.drain": RESPONDERS,
    "agent.retire": ADMIN,
    "agent.rotate_key": ADMIN,
    "rate.read": STAFF,
    "rate.write": MONEY,
    "policy.read": STAFF,
    "policy.push": ADMIN,
    "policy.rollback": RESPONDERS,
    "flex.read": STAFF,
    "flex.act": RESPONDERS,
    "job.read": EVERYONE,
    "job.submit": ADMIN | {Role.TENANT},
    "job.write": ADMIN | {Role.TENANT},
    "usage.read": EVERYONE,
    "usage.write": ADMIN,
    "quarantine.read": MONEY,
    "quarantine.write": MONEY,
    "finance.read": STAFF,
    "finance.write": MONEY,
    "request.read": EVERYONE,
    "alert.read": STAFF,
    "alert.act": RESPONDERS,
    "alert.configure": ADMIN,
    "event.write": RESPONDERS,
    "slo.read": EVERYONE,
    "audit.read": STAFF,
    "settings.read": STAFF,
    "lab.read": STAFF,
    "lab.run": MONEY | RESPONDERS,
}


def allows(role: str | None, permission: str) -> bool:
    """True when the role holds the permission. An unknown permission is a bug and raises KeyError."""
    return role is not None and role in PERMISSIONS[permission]
