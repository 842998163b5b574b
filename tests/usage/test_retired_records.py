"""A retired day stays readable: from the hour to its requests, and from the request to what it was charged."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from django.db import connection

from controlplane.core.period import to_us
from controlplane.ledger.models import AttributionInterval
from controlplane.ledger.queries import hour_requests
from controlplane.usage import retirement
from controlplane.usage.ingest import store_records
from controlplane.usage.models import RetiredDay
from controlplane.usage.partitions import create_days
from controlplane.usage.queries import find_request
from controlplane.usage.records import Origin, to_columns
from controlplane.usage.retirement import ArchiveChanged
from controlplane.web.numerals import money_exact
from tests import factories
from tests.usage_rows import as_tuple, usage_row

NOW = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
OLD = NOW - timedelta(days=40)


def id_of(at: datetime, number: int) -> str:
    """A version 7 id of that instant."""
    milliseconds = to_us(at) // 1000
    return str(UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62) | number))


@pytest.fixture(autouse=True)
def archive(settings, tmp_path, transactional_db):
    settings.USAGE_ARCHIVE, settings.USAGE_RECORD_DAYS = tmp_path / "archive", 31
    yield settings.USAGE_ARCHIVE
    with connection.cursor() as cursor:
        for back in range(3):
            cursor.execute(f"DROP TABLE IF EXISTS usage_record_{OLD - timedelta(days=1 - back):%Y%m%d}")


def store(in_transaction, world, received, **more):
    row = usage_row(
        world, prices=world.prices, ended_us=to_us(received - timedelta(seconds=5)), slot_id=-1,
        client_request_id="naïve 漢字", **more,
    )  # fmt: skip
    in_transaction(create_days, [received.date()])
    in_transaction(store_records, to_columns([(Origin(7, world.pool.pk), [as_tuple(row)])]), received)
    return row


def test_a_request_of_a_retired_day_is_found_with_every_value(world, in_transaction):
    request_id = UUID(id_of(OLD - timedelta(seconds=20), 1))
    store(in_transaction, world, OLD, request_id=str(request_id), queue_us=-1)
    [before] = find_request(request_id, now=NOW).records
    retirement.retire_old_days(NOW)
    found = find_request(request_id, now=NOW)
    assert found.archived and len(found.records) == 1
    fields = [field.attname for field in before._meta.concrete_fields]
    assert {name: getattr(found.records[0], name) for name in fields} == {n: getattr(before, n) for n in fields}
    assert find_request(UUID(id_of(OLD, 2)), now=NOW).records == []


def test_attempts_on_both_sides_of_the_archive_are_one_request(world, in_transaction):
    request_id = id_of(OLD - timedelta(seconds=20), 1)
    store(in_transaction, world, OLD + timedelta(hours=13), request_id=request_id, attempt=2)
    store(in_transaction, world, OLD, request_id=request_id, attempt=1)
    retirement.retire_day(OLD.date(), NOW)
    found = find_request(UUID(request_id), now=NOW)
    assert [record.attempt for record in found.records] == [1, 2] and found.archived


def test_the_page_of_a_retired_request_shows_charge_rate_and_revision(world, in_transaction):
    card = world.card
    request_id = id_of(OLD - timedelta(seconds=20), 1)
    row = store(in_transaction, world, OLD, request_id=request_id, rate_version=card.pk, revision=7)
    retirement.retire_old_days(NOW)
    response = factories.person("finance", name="fin").get(f"/requests/{request_id}/")
    text = response.content.decode()
    assert response.status_code == 200 and "read from the archive of that day" in text
    story = response.context["story"]
    charge = row.charge_prompt_nanos + row.charge_cached_nanos + row.charge_output_nanos + row.charge_gpu_nanos
    assert story.charge_nanos == charge > 0 and story.card.pk == card.pk
    assert f"Rate card version {card.pk}" in text and money_exact(card.output_nanos_per_mtok) in text
    assert {"label": "Revision", "value": 7} in story.facts
    stranger = factories.people()["stranger"]
    assert stranger.get(f"/requests/{request_id}/").status_code == 404


def test_an_hour_of_a_retired_day_opens_its_requests(world, in_transaction, archive):
    ids = [id_of(OLD - timedelta(minutes=1), number) for number in range(3)]
    for number, request_id in enumerate(ids):
        store(in_transaction, world, OLD, request_id=request_id, gpu_us=1000 * (number + 1))
    starts = (OLD - timedelta(seconds=5)).replace(minute=0, second=0)
    interval = AttributionInterval.objects.create(
        pool=world.pool, starts_at=starts, ends_at=starts + timedelta(hours=1), method="usage", attributed_at=NOW
    )
    kept = hour_requests(interval, "acme", "chat")
    assert [str(line.request_id) for line in kept] == ids[::-1]
    retirement.retire_old_days(NOW)
    assert hour_requests(interval, "acme", "chat") == kept
    client = factories.person("finance")
    address = f"/finance/intervals/{interval.pk}/?tenant=acme&class=chat"
    text = client.get(address).content.decode()
    assert all(f"/requests/{request_id}/" in text for request_id in ids) and f"{OLD:%Y-%m-%d}" in text
    (archive / RetiredDay.objects.get(day=OLD.date()).path).unlink()
    gone = client.get(address)
    assert gone.status_code == 200 and gone.context["requests"] == [] and gone.context["unreadable"]
    text = gone.content.decode()
    assert "No record of acme" not in text and "restore the file" in text, "what cannot be read is not called none"


def test_a_file_that_is_gone_is_unknown_and_never_no_request(world, in_transaction, archive):
    request_id = id_of(OLD - timedelta(seconds=20), 1)
    store(in_transaction, world, OLD, request_id=request_id)
    [day] = retirement.retire_old_days(NOW)
    (archive / day.path).write_bytes(b"PAR1")
    with pytest.raises(ArchiveChanged):
        find_request(UUID(request_id), now=NOW)
    response = factories.person("finance", name="fin").get(f"/requests/{request_id}/")
    assert response.status_code == 503
    assert "is not known" in response.content.decode() and "restore the file" in response.content.decode()
    member = factories.people()["tenant"].get(f"/requests/{request_id}/").content.decode()
    assert "Ask the operators" in member and str(archive) not in member
