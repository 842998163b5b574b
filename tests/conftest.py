"""Fixtures that every suite shares: an installation, people of each role, and a fixed instant."""

from datetime import UTC, datetime

import pytest

from tests import factories


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
