"""What is configured, reachable and migrated: one finding a part, for `manage.py doctor`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import redis
from django.conf import settings
from django.core.checks import Error, run_checks
from django.db import DatabaseError, connection
from django.db.migrations.executor import MigrationExecutor
from kombu import Connection
from kombu.exceptions import OperationalError

from controlplane.fleet.models import Agent, AgentLive
from controlplane.flex.models import ControllerTerm
from controlplane.policy.models import SigningKey
from controlplane.tenants.models import Installation

TIMEOUT_S = 3
SILENT_AFTER = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class Finding:
    """`detail` says what was seen and, where it is not right, what to do."""

    part: str
    right: bool
    detail: str


def examine(now: datetime) -> list[Finding]:
    """Every part in the order in which it is needed; parts behind a database that is down are left out."""
    findings = [_settings(), _reached("database", _database)]
    if findings[-1].right:
        findings += [
            _reached(name, part) for name, part in (("migrations", _migrations), ("installation", _installation))
        ]
    if all(finding.right for finding in findings[1:]):
        findings += [_signing_keys(), _controller(now), *_agents(now)]
    findings += [_reached("redis", _redis), _reached("broker", _broker)]
    return findings


def _reached(part: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(part, True, look())
    except (DatabaseError, redis.RedisError, OperationalError, OSError, LookupError) as error:
        return Finding(part, False, " ".join(str(error).split()) or type(error).__name__)


def _settings() -> Finding:
    errors = [error for error in run_checks() if isinstance(error, Error)]
    if errors:
        return Finding("settings", False, "; ".join(str(error.msg) for error in errors))
    if not settings.SECRET_KEY_IS_SET:
        return Finding("settings", False, "no secret key: set FLEXBAND_SECRET_KEY_FILE or FLEXBAND_SECRET_KEY")
    return Finding("settings", True, "checks pass, the secret key is set")


def _database() -> str:
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_user, current_setting('server_version_num')::int")
        user, version = cursor.fetchone()
    if version < 150_000:
        raise LookupError(f"PostgreSQL {version // 10_000} is too old: 15 or newer is needed")
    return f"PostgreSQL {version // 10_000} as {user}"


def _migrations() -> str:
    executor = MigrationExecutor(connection)
    missing = executor.migration_plan(executor.loader.graph.leaf_nodes())
    if missing:
        raise LookupError(f"{len(missing)} migrations are missing: run `manage.py set_up` as the owner")
    return "all applied"


def _installation() -> str:
    row = Installation.objects.filter(pk=1).first()
    if row is None:
        raise LookupError("not set up: run `manage.py set_up`")
    return f"{row.name}, billing zone {row.billing_zone}, {row.currency}"


def _signing_keys() -> Finding:
    uses = set(SigningKey.objects.filter(revoked_at=None).values_list("use", flat=True))
    missing = sorted({use.value for use in SigningKey.Use} - uses)
    if missing:
        return Finding("signing keys", False, f"none for {', '.join(missing)}: start a worker or a controller once")
    return Finding("signing keys", True, "policy, live list and nudges")


def _controller(now: datetime) -> Finding:
    term = ControllerTerm.objects.order_by("-expires_at").first()
    if term is None or term.expires_at < now:
        return Finding("controller", False, "none leads: start `manage.py controller`")
    return Finding("controller", True, f"{term.holder} leads in term {term.term}")


def _agents(now: datetime) -> Iterator[Finding]:
    last = dict(AgentLive.objects.values_list("agent_id", "reported_at"))
    for agent in Agent.objects.exclude(state=Agent.State.RETIRED).order_by("name"):
        seen = last.get(agent.pk)
        if seen is None:
            yield Finding(f"agent {agent.name}", False, "has not reported: is its process running?")
        elif now - seen > SILENT_AFTER:
            yield Finding(f"agent {agent.name}", False, f"silent since {seen:%Y-%m-%d %H:%M:%S} UTC")
        else:
            # agents go on reporting while the other parts are examined
            ago_s = max(0.0, (now - seen).total_seconds())
            yield Finding(f"agent {agent.name}", True, f"reported {ago_s:.1f} s ago")


def _redis() -> str:
    client = redis.Redis.from_url(settings.REDIS_URL, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    info: dict[str, Any] = client.info("server")  # type: ignore[assignment]
    return f"{info.get('server_name', 'redis')} {info.get('valkey_version', info.get('redis_version'))}"


def _broker() -> str:
    with Connection(settings.CELERY_BROKER_URL, connect_timeout=TIMEOUT_S) as broker:
        broker.ensure_connection(max_retries=1, timeout=TIMEOUT_S)
        return broker.transport_cls if isinstance(broker.transport_cls, str) else broker.as_uri().split(":", 1)[0]
