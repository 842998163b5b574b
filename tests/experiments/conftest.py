"""A pool with a policy in force and an hour of records of what it served."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from django.db import connection
from django.utils import timezone

from controlplane.core.period import from_us, to_us
from controlplane.fleet.models import Agent
from controlplane.jobs.models import Job
from controlplane.ledger.models import RateCard
from controlplane.policy.signing import ensure_keys
from controlplane.usage.models import UsageRecord
from controlplane.usage.partitions import create_days
from tests import factories
from tests.agent.control_planes import push_policy
from tests.usage_rows import usage_row
from tests.world import World, build_world

REQUESTS, ITEMS = 240, 80
HELD_US = 12_000
"""base + 50 us for each prompt token, then 4,000 us for each output token: what the records say."""


@pytest.fixture
def world(transactional_db, settings, tmp_path: Path) -> World:
    settings.SIGNING_KEY_DIR = tmp_path / "keys"
    settings.AGENT_BROKER_URL = ""
    made = build_world()
    RateCard.objects.create(
        class_slug="bulk", model=made.pool.model, effective_from=factories.NOW, prompt_nanos_per_mtok=500_000_000,
        cached_nanos_per_mtok=100_000_000, output_nanos_per_mtok=1_000_000_000, created_at=factories.NOW,
        created_by="finance",
    )  # fmt: skip
    agent = factories.agent(made.pool)
    for slot in made.slots:
        slot.agent = agent
        slot.save(update_fields=["agent"])
    made.pool.safe_rate = {"entries": {"4": 6.0, "6": 9.0}}
    made.pool.save(update_fields=["safe_rate"])
    ensure_keys(timezone.now())
    assert push_policy() and Agent.objects.count() == 1
    return made


@pytest.fixture
def until() -> datetime:
    return timezone.now().replace(microsecond=0)


@pytest.fixture
def served(world: World, until: datetime) -> World:
    """Requests of a tenant over the last half hour, and the items of one job."""
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE usage_record")
        create_days(cursor, [until.date(), (until - timedelta(days=1)).date(), (until + timedelta(days=1)).date()])
    job = Job.objects.create(
        tenant=world.tenant, workload_class=world.bulk, pool=world.pool, name="night", items=ITEMS, prompt_tokens=1,
        expected_output_tokens=1, deadline=until + timedelta(hours=1), created_at=until - timedelta(minutes=25),
        created_by="ada",
    )  # fmt: skip
    rng, rows = Random(8), []
    for number in range(REQUESTS + ITEMS):
        item = number >= REQUESTS
        prompt, output = rng.randint(50, 2_000), rng.randint(5, 200)
        arrived = to_us(until) - rng.randrange(1, 1_750_000_000)
        prefill, decode = HELD_US + 50 * prompt, 4_000 * output
        row = usage_row(
            world, arrived_us=arrived, ended_us=arrived + prefill + decode, prompt_tokens=prompt, cached_tokens=0,
            output_tokens=output, prefill_us=prefill, decode_us=decode, ttft_us=prefill,
            class_id=(world.bulk if item else world.chat).pk, asked_class_id=(world.bulk if item else world.chat).pk,
        )  # fmt: skip
        fields = {name: getattr(row, name) for name in row.__struct_fields__}
        fields |= {
            "request_id": uuid.uuid4(), "arrived_at": from_us(row.arrived_us), "ended_at": from_us(row.ended_us),
            "received_at": from_us(row.ended_us), "agent_id": 1, "pool_id": world.pool.pk,
            "job_id": job.pk if item else 0,
        }  # fmt: skip
        for name in ("arrived_us", "ended_us", "job"):
            fields.pop(name)
        rows.append(UsageRecord(**fields))
    UsageRecord.objects.bulk_create(rows)
    return world
