"""Fixtures that every suite shares: an installation, people of each role, and a fixed instant."""

import gc
from datetime import UTC, datetime
from pathlib import Path

import hypothesis
import pytest
from asgiref.sync import SyncToAsync
from django.conf import settings
from django.db import connections
from django.db.backends.postgresql.operations import DatabaseOperations
from hypothesis import settings as hypothesis_settings

from tests import factories

# People of the tests sign in by the thousand; how strongly passwords are hashed is the settings' own test.
settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# How long an example takes tells of the machine's other work, not of the code.
hypothesis_settings.register_profile("suite", deadline=None)
hypothesis_settings.load_profile("suite")

# How long an example takes is the machine's business: a property fails by what it asserts.
hypothesis.settings.register_profile(
    "machine-independent", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("machine-independent")

APPEND_ONLY = (
    "audit_auditentry",
    "ledger_ledgerevent",
    "ledger_transfer",
    "ledger_periodexport",
    "flex_decision",
    "experiments_inputfile",
    "experiments_experimentresult",
)
RECORDS_TOO = "DO $$ BEGIN IF EXISTS (SELECT FROM usage_record) THEN TRUNCATE usage_record; END IF; END $$"
"""Partitioned and written by COPY alone: no model's table, so the flush of Django leaves it as it is."""
_sql_flush = DatabaseOperations.sql_flush


def _flush_append_only_too(self, style, tables, **options):
    """The suite empties the tables between committed tests; as their owner it lifts the protection for that only."""
    protected = [table for table in APPEND_ONLY if table in tables]
    statements = _sql_flush(self, style, tables, **options)
    lift = [f"ALTER TABLE {table} DISABLE TRIGGER USER" for table in protected]
    restore = [f"ALTER TABLE {table} ENABLE TRIGGER USER" for table in protected]
    return [*lift, *statements, *restore, RECORDS_TOO]


DatabaseOperations.sql_flush = _flush_append_only_too

ALONE = ("live", "embedded", "supervisor", "e2e", "chaos", "test_bootstrap.py")


def pytest_collection_modifyitems(items):
    """Marks what must not run beside other tests (see tests/__main__.py)."""
    here = Path(__file__).parent
    for item in items:
        if item.get_closest_marker("processes") or item.path.relative_to(here).parts[0] in ALONE:
            item.add_marker("alone")


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup):
    """No session but this one is left when the database is dropped.

    The thread in which asgiref runs what async tests ask of Django lives on with its connection; those of threads that
    have ended are in cycles of references, which nothing may have collected yet.
    """
    yield
    SyncToAsync.single_thread_executor.submit(connections.close_all).result()
    gc.collect()


@pytest.fixture
def now() -> datetime:
    return datetime(2026, 11, 29, 20, 0, tzinfo=UTC)


@pytest.fixture
def installation(db):
    return factories.installation()


@pytest.fixture
def people(installation):
    """role -> signed-in Django test client; `stranger` belongs to a tenant that owns nothing in the test."""
    return factories.people()
