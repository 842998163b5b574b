"""`usage/records/`: who sees which records, filters, pages to the end, values that cannot be used, retired days."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import chain
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.core.period import to_us
from controlplane.core.reasons import Outcome
from controlplane.fleet.models import ServedModel
from controlplane.tenants.models import ApiKey
from controlplane.usage import retirement
from controlplane.usage.ingest import store_records
from controlplane.usage.partitions import create_days
from controlplane.usage.record_api import RecordSerializer
from controlplane.usage.records import Origin, to_columns
from controlplane.wire.report import FLAG_CAPPED, FLAG_NOT_CHARGED, FLAG_STREAMED, FLAG_TOKENLESS
from tests import factories
from tests.usage_rows import as_tuple, usage_row

API = "/api/v1/usage/records/"
OLD = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0) - timedelta(days=40)


@pytest.fixture
def people(world):
    return factories.people()


@pytest.fixture
def store(world, in_transaction):
    def run(*, ago=timedelta(minutes=5), received=None, count=1, agent=7, **given):
        received = received or datetime.now(UTC) - ago
        values = {"prices": world.prices, "ended_us": to_us(received) - 5_000_000, **given}
        rows = [usage_row(world, **values) for _ in range(count)]
        in_transaction(create_days, [received.date()])
        in_transaction(store_records, to_columns([(Origin(agent, world.pool.pk), list(map(as_tuple, rows)))]), received)
        return [row.request_id for row in rows]

    return run


def ids(answer):
    assert answer.status_code == 200, answer.content
    return [row["request_id"] for row in answer.json()["results"]]


def walked(client, address, link="next"):
    found = []
    while address:
        answer = client.get(address)
        found += [ids(answer)]
        address = answer.json()[link]
    return found


def test_a_record_is_told_in_full(world, people, store):
    agent = factories.agent(world.pool, name="a-1")
    [request_id] = store(agent=agent.pk, client_request_id="mine-1", revision=7)
    [row] = people["finance"].get(API).json()["results"]
    assert set(row) == set(RecordSerializer().fields)
    wanted = {
        "request_id": request_id, "client_request_id": "mine-1", "attempt": 1, "tenant": "acme", "key": "key-1",
        "workload_class": "chat", "asked_workload_class": "chat", "model": world.pool.model.name,
        "pool": world.pool.slug, "slot": "i0", "agent": "a-1", "job": None, "revision": 7,
        "rate_version": world.card.pk, "outcome": "completed", "status": 200, "streamed": True, "charged": True,
        "capped": False, "prompt_tokens": 1_000, "cached_tokens": 200, "output_tokens": 150, "queue_us": 5_000,
        "ttft_us": 96_000, "gpu_us": 250_000, "estimated_gpu_us": 240_000,
    }  # fmt: skip
    assert {name: row[name] for name in wanted} == wanted
    parts = [row[f"{part}_nanos"] for part in ("prompt", "cached", "output", "gpu")]
    assert row["charge_nanos"] == sum(parts) > 0
    described = RecordSerializer(data=row)
    assert described.is_valid(), described.errors


def test_unknown_is_null_and_zero_is_zero(people, store):
    store(rate_version=0, prices=None, queue_us=-1, ttft_us=-1, batch_wait_us=0, slot_id=-1)
    [row] = people["finance"].get(API).json()["results"]
    assert (row["queue_us"], row["ttft_us"], row["batch_wait_us"], row["slot"]) == (None, None, 0, None)
    assert {row[f"{part}_nanos"] for part in ("prompt", "cached", "output", "gpu", "charge")} == {None}
    store(ago=timedelta(0), prices=None, flags=FLAG_NOT_CHARGED | FLAG_TOKENLESS, prompt_tokens=0)
    store(ago=timedelta(0), flags=FLAG_STREAMED | FLAG_CAPPED, cached_tokens=0)
    capped, free, _ = people["finance"].get(API).json()["results"]
    assert (free["charged"], free["charge_nanos"], free["prompt_tokens"], free["output_tokens"]) == (
        False,
        0,
        None,
        None,
    )
    assert (capped["capped"], capped["cached_tokens"], capped["cached_nanos"], capped["charged"]) == (True, 0, 0, True)


def test_who_sees_whose(world, people, store):
    stranger = factories.Tenant.objects.get(slug="stranger")
    own, theirs = store(), store(tenant_id=stranger.pk)
    for role in ("admin", "finance", "oncall", "viewer"):
        assert Counter(ids(people[role].get(API))) == Counter(own + theirs), role
        assert ids(people[role].get(f"{API}?tenant=stranger")) == theirs
    assert ids(people["tenant"].get(API)) == ids(people["tenant"].get(f"{API}?tenant=acme")) == own
    assert ids(people["stranger"].get(API)) == theirs
    foreign, none = (people["tenant"].get(f"{API}?tenant={slug}") for slug in ("stranger", "nobody"))
    assert (foreign.status_code, none.status_code) == (404, 404) and foreign.json() == none.json()
    foreign, none = (people["stranger"].get(f"{API}?key={key}") for key in (world.key.public_id, "key-9"))
    assert (foreign.status_code, none.status_code) == (404, 404) and foreign.json() == none.json()
    assert people["anonymous"].get(API).status_code in (401, 403)
    assert people["admin"].post(API).status_code == 405


def test_a_cursor_of_a_foreign_page_opens_nothing_of_it(people, store):
    stranger = factories.Tenant.objects.get(slug="stranger")
    store(tenant_id=stranger.pk, count=5)
    following = people["admin"].get(f"{API}?limit=2").json()["next"]
    assert len(ids(people["admin"].get(following))) == 2
    assert ids(people["tenant"].get(following)) == []


def test_filters(world, people, store):
    key = ApiKey.objects.create(
        public_id="key-2", tenant=world.tenant, name="second", prefix="fb_2", secret_hash="1" * 64, classes=["chat"],
        default_class="chat", created_at=factories.NOW,
    )  # fmt: skip
    model, pool = ServedModel.objects.create(name="other-model"), factories.pool("other-pool")
    [plain] = store()
    found = {
        "key=key-2": store(key_id=key.pk),
        "workload_class=bulk": store(class_id=world.bulk.pk),
        "model=other-model": store(model_id=model.pk),
        "outcome=upstream_error": store(outcome=Outcome.UPSTREAM_ERROR.code, status=502),
    }
    client = people["oncall"]
    for query, wanted in found.items():
        assert ids(client.get(f"{API}?{query}")) == wanted, query
    assert ids(client.get(f"{API}?key=key-1&workload_class=chat&model=llama-70b&outcome=completed")) == [plain]
    assert len(ids(client.get(f"{API}?pool={world.pool.slug}"))) == 5
    for query in (f"pool={pool.slug}", "pool=nobody", "model=nobody", "workload_class=nobody", "outcome=lost"):
        assert ids(client.get(f"{API}?{query}")) == [], query


def test_the_time_asked_for(people, store):
    now = datetime.now(UTC)
    ages = {minutes: store(received=now - timedelta(minutes=minutes))[0] for minutes in (1, 59, 61, 600)}
    client = people["admin"]

    def between(since, until):
        return ids(client.get(API, {"since": (now - since).isoformat(), "until": (now - until).isoformat()}))

    assert ids(client.get(API)) == [ages[1], ages[59]]
    assert ids(client.get(API, {"until": (now - timedelta(minutes=59)).isoformat()})) == [ages[61]]
    assert between(timedelta(minutes=61), timedelta(minutes=59)) == [ages[61]], "from included, until excluded"
    assert between(timedelta(hours=20), timedelta(0)) == list(ages.values())
    assert ids(client.get(f"{API}?ordering=received_at")) == [ages[59], ages[1]]


@pytest.mark.parametrize("query", ["limit=3", "limit=3&ordering=received_at"])
def test_pages_hold_every_record_once_and_lead_back(people, store, query):
    for second in range(0, 1_200, 200):
        store(ago=timedelta(seconds=second + 60), count=4)
    client = people["tenant"]
    whole = ids(client.get(f"{API}?{query.replace('limit=3', 'limit=500')}"))
    pages = walked(client, f"{API}?{query}")
    assert list(chain(*pages)) == whole and len(set(whole)) == 24 and len(pages) == 8
    last = client.get(f"{API}?{query}").json()["next"]
    while following := client.get(last).json()["next"]:
        last = following
    back = walked(client, last, "previous")
    assert list(chain(*back[::-1])) == whole


def test_attempts_received_at_once_are_all_in_the_pages(people, store):
    request_id, received = str(uuid4()), datetime.now(UTC) - timedelta(minutes=1)
    for attempt in (1, 2, 3):
        for agent in (7, 8):
            store(received=received, agent=agent, request_id=request_id, attempt=attempt)
    attempts = []
    address = f"{API}?limit=1"
    while address:
        answer = people["admin"].get(address).json()
        attempts += [row["attempt"] for row in answer["results"]]
        address = answer["next"]
    assert attempts == [3, 3, 2, 2, 1, 1]


def test_following_pages_are_of_the_first_ones_time(people, store):
    """By default it is the last hour, which moves on while a client walks."""
    store(ago=timedelta(minutes=59, seconds=58), count=3)
    following = people["admin"].get(f"{API}?limit=2").json()["next"]
    connection.cursor().execute("SELECT pg_sleep(2.5)")
    assert len(ids(people["admin"].get(following))) == 1


@pytest.mark.parametrize(
    "query,field",
    [
        ("since=yesterday", "since"),
        ("until=2026-13-01", "until"),
        ("since=2026-11-02T00:00:00Z&until=2026-11-01T00:00:00Z", "since"),
        ("since=2026-11-01T00:00:00Z&until=2026-11-02T00:00:01Z", "since"),
        ("since=2000-01-01T00:00:00Z", "since"),
        ("until=0001-01-01T00:00:00Z", "since"),
        ("outcome=rate_limit", "outcome"),
        ("pool=" + "p" * 64, "pool"),
    ],
)
def test_what_cannot_be_used_is_refused_by_field(people, query, field):
    answer = people["admin"].get(f"{API}?{query}")
    assert answer.status_code == 400 and list(answer.json()["errors"]) == [field], answer.content


def test_a_cursor_of_another_list_is_none(people, store):
    store(count=3)
    other = people["admin"].get("/api/v1/audit/?limit=1").json()["next"] or "?cursor=WyJhZnRlciIsMV0"
    for cursor in (other.partition("cursor=")[2], "nonsense", "WyJhZnRlciIsMSwyLDMsNF0"):
        assert people["admin"].get(f"{API}?cursor={cursor}").status_code == 404


def test_a_page_takes_the_same_statements_whatever_it_holds(people, store):
    counts = []
    for count in (1, 40):
        store(count=count)
        with CaptureQueriesContext(
            connection,
        ) as taken:
            assert people["finance"].get(f"{API}?limit=500").status_code == 200
        counts.append(len(taken))
    assert counts[0] == counts[1] <= 15


@pytest.fixture
def archive(settings, tmp_path, world):
    settings.USAGE_ARCHIVE, settings.USAGE_RECORD_DAYS = tmp_path / "archive", 31
    yield
    with connection.cursor() as cursor:
        for back in (0, 1):
            cursor.execute(f"DROP TABLE IF EXISTS usage_record_{OLD + timedelta(days=back):%Y%m%d}")


def test_a_retired_day_is_gone_and_never_an_empty_page(archive, people, store):
    kept = store(received=OLD + timedelta(days=1))
    store(received=OLD)
    retirement.retire_day(OLD.date(), datetime.now(UTC))
    tomorrow = f"{OLD + timedelta(days=1):%Y-%m-%d}T00:00:00Z"
    whole = people["tenant"].get(API, {"since": tomorrow, "until": (OLD + timedelta(hours=30)).isoformat()})
    assert ids(whole) == kept
    for since, until in (
        (OLD - timedelta(minutes=1), OLD + timedelta(minutes=1)),
        (OLD + timedelta(hours=3), OLD + timedelta(hours=4)),
        (OLD + timedelta(hours=8), OLD + timedelta(hours=30)),
    ):
        answer = people["tenant"].get(API, {"since": since.isoformat(), "until": until.isoformat()})
        assert answer.status_code == 410 and answer.json()["code"] == "retired"
        assert f"{OLD:%Y-%m-%d}" in answer.json()["title"]
