"""From a line of an hour to the requests behind it."""

from datetime import timedelta

import pytest
from django.db import connection

from controlplane.ledger.attribution import attribute
from controlplane.ledger.models import AttributionInterval
from controlplane.usage.partitions import create_days
from tests import factories
from tests.ledger.fleet_rows import HOUR, ONE_HOUR, worked_example


@pytest.fixture
def fleet(db):
    made = worked_example()
    attribute(made.pool, HOUR, HOUR + ONE_HOUR, HOUR + timedelta(hours=2))
    with connection.cursor() as cursor:
        create_days(cursor, [HOUR.date()])
    return made


def record(fleet, number, tenant, *, at=HOUR, gpu_us=1_000):
    names = [
        "request_id", "received_at", "arrived_at", "ended_at", "pool_id", "tenant_id", "class_id", "gpu_us",
        "charge_prompt_nanos",
    ]  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'usage_record'"
        )
        rest = [(n, "''" if kind == "text" else "0") for n, kind in cursor.fetchall() if n not in names]
        cursor.execute(
            f"INSERT INTO usage_record ({', '.join([*names, *(n for n, _ in rest)])})"
            f" VALUES ({', '.join(['%s'] * len(names) + [text for _, text in rest])})",
            [
                f"00000000-0000-7000-8000-{number:012d}", at, at, at, fleet.pool.pk, fleet.tenants[tenant].pk,
                fleet.classes["chat"].pk, gpu_us, 5,
            ],
        )  # fmt: skip


def test_a_line_opens_the_requests_that_ended_in_its_hour(fleet):
    record(fleet, 1, "a", gpu_us=2_000_000)
    record(fleet, 2, "a", at=HOUR + timedelta(minutes=59), gpu_us=7_000_000)
    record(fleet, 3, "b")
    record(fleet, 4, "a", at=HOUR + ONE_HOUR)
    interval = AttributionInterval.objects.get()
    client = factories.person("finance")
    response = client.get(f"/finance/intervals/{interval.pk}/?tenant=a&class=chat")
    assert [row.gpu_us for row in response.context["requests"]] == [7_000_000, 2_000_000]
    text = response.content.decode()
    assert "/requests/00000000-0000-7000-8000-000000000002/" in text and "000000000003" not in text
    none = client.get(f"/finance/intervals/{interval.pk}/?tenant=c&class=chat").content.decode()
    assert "No record of c, chat" in none
    assert client.get(f"/finance/intervals/{interval.pk}/?tenant=x&class=y").status_code == 200


def test_a_leaf_of_the_pivot_names_its_model(fleet):
    text = factories.person("finance").get("/finance/?period=2026-11-20&rows=all").content.decode()
    assert '<span class="second">llama-70b</span>' in text
