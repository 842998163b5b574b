"""A fleet to look at, a Redis of the tests' own keys, and the real socket stack."""

from datetime import UTC, datetime

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.template.loader import get_template
from django.urls import reverse

from controlplane.embedded.binaries import find_valkey
from controlplane.live.frames import LAST_PREFIX
from controlplane.usage.partitions import create_days, days_ahead
from tests.live import scene as scenes


@pytest.fixture(scope="session")
def warm():
    """What a process's first page takes seconds for on a busy machine: the scene's reports would be late by then."""
    reverse("home")
    for name in ("live/home.html", "live/pool.html", "live/tenant.html"):
        get_template(name)


@pytest.fixture
def moment(warm) -> datetime:
    return datetime.now(UTC)


@pytest.fixture
def scene(db, moment):
    with connection.cursor() as cursor:
        create_days(cursor, days_ahead(moment))
    return scenes.build(moment)


@pytest.fixture
def frames_redis():
    """The Redis that frames go through, without any topic kept from before."""
    client = redis.Redis.from_url(settings.REDIS_URL)
    for key in client.scan_iter(LAST_PREFIX + "*"):
        client.delete(key)
    yield client
    for key in client.scan_iter(LAST_PREFIX + "*"):
        client.delete(key)
    client.close()


@pytest.fixture(scope="session")
def valkey_binary() -> str:
    return str(find_valkey())
