from datetime import UTC, datetime

import pytest

from controlplane.budgets.models import Budget
from controlplane.exchange.database import close_pools, connection
from tests import factories


@pytest.fixture
def budget(transactional_db):
    """A tenant under a parent: makes hard budgets by name and limit."""
    factories.installation()
    parent = factories.tenant("group")
    child = factories.tenant("acme", parent=parent)

    def make(*, limit, tenant=child, period="day", zone="UTC", hard=True, name="plan", **values):
        return Budget.objects.create(
            tenant=tenant, name=name, period=period, zone=zone, limit_nanos=limit, hard=hard,
            created_at=factories.NOW, updated_at=factories.NOW, **values,
        )  # fmt: skip

    make.child, make.parent = child, parent
    yield make
    close_pools()


@pytest.fixture
def in_transaction():
    """Runs a function of a cursor in a transaction of its own, as the exchange does."""

    def run(function, *arguments, **named):
        with connection() as held, held.transaction(), held.cursor() as cursor:
            return function(cursor, *arguments, **named)

    return run


@pytest.fixture
def noon():
    return datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
