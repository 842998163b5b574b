"""The list of months: from the first that anything happened in to the present one."""

from datetime import UTC, datetime

import pytest

from controlplane.ledger.models import Period
from controlplane.ledger.period_queries import months

LATER = datetime(2027, 1, 15, tzinfo=UTC)

pytestmark = pytest.mark.usefixtures("installation")


def test_the_month_before_is_listed_though_nothing_happened_yet():
    assert [(month.name, month.state) for month in months(LATER)] == [("2027-01", "running"), ("2026-12", "open")]


def test_a_month_that_was_closed_is_listed_however_long_ago_and_though_nothing_was_posted_in_it():
    Period.objects.create(name="2026-10", state=Period.State.CLOSED, version=1)
    assert [(month.name, month.state) for month in months(LATER)] == [
        ("2027-01", "running"), ("2026-12", "open"), ("2026-11", "open"), ("2026-10", "closed"),
    ]  # fmt: skip
