"""Rows of the queue panel: one for each class that has a queue."""

from datetime import UTC, datetime

from controlplane.live.queues import QueueNames, queue_rows

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)


def test_a_class_that_nobody_has_makes_no_row():
    """Refused requests that asked for one are counted under the id 0; they stand in no queue."""
    names = QueueNames(classes={2: ("chat", "interactive")}, tenants={1: "acme"})
    refused = {(0, 1): {"class_not_allowed": 3}, (2, 1): {"rate_limit": 4}}
    for tenant_id in (None, 1):
        rows = queue_rows([], names, refused, NOW, tenant_id=tenant_id)
        assert rows and not any(row["key"].startswith("c0") or "class 0" in row["name"] for row in rows)
    assert queue_rows([], names, {(0, 1): {"class_not_allowed": 3}}, NOW) == []
