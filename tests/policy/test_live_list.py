import random
import threading
from datetime import timedelta

import msgspec
import pytest
from django.db import connections, transaction
from django.utils import timezone

from controlplane.core.generations import LIVE_STEP
from controlplane.policy import tasks
from controlplane.policy.live_list import URGENT_MOST, delta, newest, sign_changes, urgent
from controlplane.policy.models import LiveEntry
from controlplane.policy.queries import signing_keys
from controlplane.policy.signing import rotate
from controlplane.tenants.actions import next_live_number
from controlplane.tenants.models import ApiKey, Installation, Tenant
from controlplane.wire.policy import LiveBody, LiveKey, LiveTenant, live_message
from controlplane.wire.signing import digest_hex, from_text, verify
from tests import factories
from tests.policy.conftest import Listeners, api_key, make_fleet, wait_for


def bodies(found) -> list:
    return [msgspec.json.decode(from_text(item.body), type=LiveBody) for item in found.entries]


def change(row, **values) -> int:
    with transaction.atomic():
        number = next_live_number()
        type(row).objects.filter(pk=row.pk).update(live_number=number, **values)
    return number


@pytest.mark.django_db
class TestSigning:
    def test_keys_suspensions_and_freezes_become_signed_entries(self, fleet, now):
        key = api_key(fleet.tenant, previous_hash="b" * 64, previous_valid_until=now)
        change(key)
        change(fleet.tenant, state="suspended")
        change(fleet.classes[0], state="suspended")
        change(fleet.pool, frozen_since=now, frozen_until=now + timedelta(hours=1))
        assert sign_changes(now) == 4
        found = delta(0)
        assert (found.full, found.through, [item.number for item in found.entries]) == (True, 4, [1, 2, 3, 4])
        first, tenant, workload_class, freeze = bodies(found)
        assert (first.hashes, first.previous_until_us) == ([key.secret_hash, "b" * 64], 1_795_982_400_000_000)
        assert (tenant.state, workload_class.slug) == ("suspended", "chat")
        assert freeze.frozen_until_us == 1_795_986_000_000_000
        for item in found.entries:
            message = live_message(
                installation=str(factories.installation().uuid),
                number=item.number,
                digest=digest_hex(from_text(item.body)),
            )
            public = from_text(signing_keys()[f"live:{item.kid}"])
            assert verify(public, from_text(item.signature), message)

    def test_a_second_run_signs_nothing(self, fleet, now):
        change(api_key(fleet.tenant))
        assert (sign_changes(now), sign_changes(now)) == (1, 0)

    def test_a_later_change_replaces_the_entry_about_the_same_subject(self, fleet, now):
        key = api_key(fleet.tenant)
        change(key)
        sign_changes(now)
        change(key, state="revoked")
        sign_changes(now)
        assert [(row.number, row.subject) for row in LiveEntry.objects.all()] == [(2, str(key.pk))]
        assert [body.state for body in bodies(delta(1))] == ["revoked"]

    def test_rows_without_a_number_get_one(self, fleet, now):
        for number in range(3):
            api_key(fleet.tenant, number)
        assert sign_changes(now) == 3
        assert sorted(ApiKey.objects.values_list("live_number", flat=True)) == [1, 2, 3]

    def test_rows_that_share_a_number_each_get_an_entry(self, fleet, now):
        for number in range(3):
            api_key(fleet.tenant, number, live_number=5)
        Installation.objects.update(live_number=7)
        assert sign_changes(now) == 3
        assert list(LiveEntry.objects.order_by("number").values_list("number", flat=True)) == [5, 8, 9]

    def test_a_revoked_signing_key_is_replaced(self, fleet, now, no_broker):
        change(api_key(fleet.tenant))
        sign_changes(now)
        successor = rotate("live", now)
        tasks.sweep()
        assert LiveEntry.objects.get().kid == successor


@pytest.mark.django_db
class TestDelta:
    @pytest.fixture
    def five(self, fleet, now):
        for number in range(5):
            change(api_key(fleet.tenant, number))
        sign_changes(now)

    def test_nothing_new_is_no_delta(self, five):
        assert delta(5) is None

    def test_a_list_of_an_earlier_generation_is_replaced_whole(self, five):
        """An agent may have numbers of a database that is lost: below ours, and about something else."""
        LiveEntry.objects.filter(number=5).update(number=LIVE_STEP + 5)
        found = delta(4)
        assert (found.full, found.since, found.through, len(found.entries)) == (True, 0, LIVE_STEP + 5, 5)
        assert not delta(LIVE_STEP + 4).full

    def test_a_delta_starts_after_what_the_agent_has(self, five):
        found = delta(3)
        assert (found.since, found.through, found.full, [item.number for item in found.entries]) == (
            3,
            5,
            False,
            [4, 5],
        )

    def test_a_long_list_comes_in_parts(self, five):
        first = delta(0, limit=2)
        second = delta(first.through, limit=2)
        assert (first.full, first.through, second.full, second.through) == (True, 2, False, 4)

    def test_an_agent_ahead_of_us_starts_over(self, five):
        found = delta(99)
        assert (found.full, found.since, found.through, len(found.entries)) == (True, 0, 5, 5)


@pytest.mark.django_db(transaction=True)
def test_no_change_is_skipped_under_concurrent_changes():
    """Writers hold their number for a random while; a reader follows by deltas and ends with every key's last state."""
    fleet = make_fleet(1)
    keys = [api_key(fleet.tenant, number) for number in range(8)]
    seen: dict[int, LiveKey] = {}
    numbers: list[int] = []
    done = threading.Event()

    def write(seed: int) -> None:
        choice = random.Random(seed)
        for step in range(12):
            key = choice.choice(keys)
            with transaction.atomic():
                number = next_live_number()
                ApiKey.objects.filter(pk=key.pk).update(live_number=number, max_concurrency=seed * 100 + step)
                threading.Event().wait(choice.random() / 200)
        connections.close_all()

    def sign() -> None:
        while not done.is_set():
            sign_changes(timezone.now())
        connections.close_all()

    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    signers = [threading.Thread(target=sign) for _ in range(2)]
    for thread in (*writers, *signers):
        thread.start()
    while any(thread.is_alive() for thread in writers):
        follow(seen, numbers)
    done.set()
    for thread in (*writers, *signers):
        thread.join(60)
    sign_changes(timezone.now())
    follow(seen, numbers)
    assert numbers == sorted(set(numbers))
    assert {pk: body.max_concurrency for pk, body in seen.items()} == dict(
        ApiKey.objects.values_list("pk", "max_concurrency")
    )
    assert newest() == Installation.objects.get().live_number


def follow(seen: dict[int, LiveKey], numbers: list[int]) -> None:
    found = delta(numbers[-1] if numbers else 0, limit=3)
    while found is not None:
        for item, body in zip(found.entries, bodies(found), strict=True):
            numbers.append(item.number)
            seen[body.id] = body
        found = delta(found.through, limit=3)


@pytest.mark.django_db(transaction=True)
def test_signing_tells_every_pool_to_ask(broker):
    fleet = make_fleet(1)
    change(api_key(fleet.tenant))
    uuid = str(fleet.agents[0].uuid)
    with Listeners(broker, "chat-70b", [uuid]) as listeners:
        assert tasks.sign_live() == 1
        wait_for(lambda: bool(listeners.heard[uuid]))
        assert tasks.sign_live() == 0
    assert [(nudge.kind, nudge.live) for nudge in listeners.nudges(uuid)] == [("live", None)]


def test_a_broadcast_carries_what_stops_something_and_the_hash_of_no_good_key(installation):
    fleet = make_fleet(1)
    good, revoked = api_key(fleet.tenant), api_key(fleet.tenant, number=2)
    change(good)
    change(revoked, state=ApiKey.State.REVOKED)
    change(fleet.tenant, state=Tenant.State.SUSPENDED)
    sign_changes(timezone.now())
    carried = [msgspec.json.decode(from_text(item.body), type=LiveBody) for item in urgent(0)]
    assert [(type(body), body.id, body.state) for body in carried] == [
        (LiveKey, revoked.pk, "revoked"),
        (LiveTenant, fleet.tenant.pk, "suspended"),
    ]
    assert urgent(newest()) == []
    for number in range(3, URGENT_MOST + 3):
        change(api_key(fleet.tenant, number=number), state=ApiKey.State.REVOKED)
    sign_changes(timezone.now())
    assert urgent(0) == [], "so many are left to reports"
