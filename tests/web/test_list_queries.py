"""Lists ask the database as often for many rows as for one: those whose own tests do not count it."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.alerts.models import Alert, Event, Receiver, Silence
from controlplane.fleet.models import AgentLive, EnrolmentToken, Pool, Slot
from controlplane.ledger import rates
from controlplane.tenants.models import ApiKey
from tests import factories
from tests.tenants.conftest import ADMIN

pytestmark = pytest.mark.django_db
MANY = 25


def alerts(number):
    now = timezone.now()
    Alert.objects.create(
        key=f"burn:{number}", kind="burn", severity="page", grade="bad", word="Burning", group=f"g{number}",
        title=f"g{number} burns", raised_at=now, seen_at=now,
    )  # fmt: skip


def silences(number):
    now = timezone.now()
    Silence.objects.create(
        pool=f"p{number}", starts_at=now, ends_at=now + timedelta(hours=1), reason="works", created_by="ada",
        created_at=now,
    )  # fmt: skip


def receivers(number):
    now = timezone.now()
    Receiver.objects.create(
        name=f"r{number}", kind="webhook", target="https://example.com/", created_at=now, updated_at=now
    )


def events(number):
    now = timezone.now()
    Event.objects.create(at=now, kind="deploy", title=f"d{number}", created_by="ci", created_at=now)


def pool():
    return Pool.objects.filter(slug="small").first() or factories.pool("small")


def agents(number):
    one = factories.agent(pool(), f"gpu-{number}")
    AgentLive.objects.create(agent=one, epoch=1, seq=1, reported_at=timezone.now())


def slots(number):
    Slot.objects.create(pool=pool(), name=f"s{number}", band="interactive")


def tokens(number):
    now = timezone.now()
    EnrolmentToken.objects.create(
        prefix=f"fbe_{number}", token_hash=f"{number}", pool=pool(), created_by="ada", created_at=now,
        expires_at=now + timedelta(hours=1),
    )  # fmt: skip


def keys(number):
    ApiKey.objects.create(
        public_id=f"key_{number}", tenant=factories.tenant(f"t{number}"), name=f"k{number}", prefix=f"p{number}",
        secret_hash=f"{number}", classes=["chat"], default_class="chat", created_at=timezone.now(),
    )  # fmt: skip


def members(number):
    factories.person("viewer", name=f"v{number}")


def costs(number):
    factories.pool(f"pool-{number}")
    rates.add_cost_rate(pool_slug=f"pool-{number}", nanos_per_slot_hour=1, actor=ADMIN, now=timezone.now(), reason="r")


LISTS = {
    "/alerts/": alerts,
    "/alerts/silences/": silences,
    "/api/v1/silences/": silences,
    "/alerts/receivers/": receivers,
    "/api/v1/events/": events,
    "/api/v1/agents/": agents,
    "/api/v1/slots/": slots,
    "/api/v1/enrolment-tokens/": tokens,
    "/api/v1/api-keys/": keys,
    "/api/v1/members/": members,
    "/api/v1/audit/": costs,
    "/api/v1/cost-rates/": costs,
}


@pytest.mark.parametrize("address", LISTS)
def test_one_row_and_many_cost_the_same(address, people):
    client, make = people["admin"], LISTS[address]

    def asked():
        client.get(address)
        with CaptureQueriesContext(connection) as statements:
            response = client.get(address)
        assert response.status_code == 200
        return len(statements), len(response.content)

    make(0)
    few, small = asked()
    for number in range(1, MANY):
        make(number)
    many, large = asked()
    assert large > small, "the list shows what was made"
    assert many == few
