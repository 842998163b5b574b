"""Keys: secrets that are shown once, limits within the tenant's, rotation that can be repeated."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError

from controlplane.audit.models import AuditEntry
from controlplane.tenants import key_actions
from controlplane.tenants.actions import Stale
from controlplane.tenants.key_actions import IssuedKey, secret_hash
from controlplane.tenants.models import ApiKey
from tests import factories
from tests.tenants.conftest import ADMIN, side_by_side

NOW = factories.NOW
HOURS_48 = timedelta(hours=48)


def create(acme, **values) -> IssuedKey:
    defaults = {"name": "web", "classes": ["chat"], "default_class": "chat", "actor": ADMIN, "now": NOW}
    return key_actions.create_key(tenant_id=acme.pk, **{**defaults, **values})


def rotate(key: ApiKey, rotation_id: str = "rotation-1", *, now=NOW, overlap=HOURS_48, **values) -> IssuedKey:
    return key_actions.rotate_key(
        key_id=key.pk, rotation_id=rotation_id, overlap=overlap, reason="yearly", actor=ADMIN, now=now, **values
    )


@pytest.mark.django_db
class TestCreate:
    def test_the_row_holds_a_hash_and_the_answer_the_secret(self, acme):
        issued = create(acme)
        kind, prefix, random = issued.secret.split("_", 2)
        assert kind == "fb" and prefix == issued.key.prefix and len(random) >= 43
        assert issued.key.secret_hash == secret_hash(issued.secret)
        stored = str(list(ApiKey.objects.values())) + str(list(AuditEntry.objects.values()))
        assert issued.secret not in stored and random not in stored

    def test_two_keys_never_share_anything(self, acme):
        first, second = create(acme), create(acme)
        assert first.secret != second.secret and first.key.public_id != second.key.public_id

    @pytest.mark.parametrize(
        "values,field",
        [
            ({"name": " "}, "name"),
            ({"classes": []}, "classes"),
            ({"classes": ["secret-class"], "default_class": "secret-class"}, "classes"),
            ({"default_class": "bulk"}, "default_class"),
            ({"max_concurrency": 0}, "max_concurrency"),
            ({"requests_per_s": float("nan")}, "requests_per_s"),
            ({"tokens_per_minute": 2**31}, "tokens_per_minute"),
            ({"expires_at": NOW}, "expires_at"),
        ],
    )
    def test_refuses_what_cannot_work(self, values, field, acme):
        with pytest.raises(ValidationError) as caught:
            create(acme, **values)
        assert field in caught.value.message_dict
        assert not ApiKey.objects.exists()


@pytest.mark.django_db
class TestEdit:
    def test_acts_at_once_and_says_before_and_after(self, acme):
        key = create(acme).key
        edited = key_actions.edit_key(
            key_id=key.pk, version=1, changes={"max_concurrency": 4}, actor=ADMIN, now=NOW, reason="too loud"
        )
        assert edited.live_number > key.live_number and edited.version == 2
        entry = AuditEntry.objects.get(action="key.edit")
        assert (entry.before, entry.after) == ({"max_concurrency": None}, {"max_concurrency": 4})

    def test_an_old_version_is_stale(self, acme):
        key = create(acme).key
        key_actions.edit_key(key_id=key.pk, version=1, changes={"name": "x"}, actor=ADMIN, now=NOW)
        with pytest.raises(Stale):
            key_actions.edit_key(key_id=key.pk, version=1, changes={"name": "y"}, actor=ADMIN, now=NOW)

    def test_a_revoked_key_stays_as_it_is(self, acme):
        key = key_actions.revoke_key(key_id=create(acme).key.pk, reason="leaked", actor=ADMIN, now=NOW)
        assert (key.state, key.revoked_at) == ("revoked", NOW)
        again = key_actions.revoke_key(key_id=key.pk, reason="leaked", actor=ADMIN, now=NOW)
        assert again.live_number == key.live_number
        for call in (
            lambda: rotate(key),
            lambda: key_actions.edit_key(key_id=key.pk, version=2, changes={"name": "x"}, actor=ADMIN, now=NOW),
        ):
            with pytest.raises(ValidationError, match="revoked"):
                call()


@pytest.mark.django_db
class TestRotate:
    def test_both_secrets_work_for_the_overlap_and_the_id_stays(self, acme):
        issued = create(acme)
        rotated = rotate(issued.key)
        assert rotated.key.public_id == issued.key.public_id
        assert rotated.key.secret_hash == secret_hash(rotated.secret)
        assert rotated.key.previous_hash == secret_hash(issued.secret)
        assert rotated.key.previous_valid_until == NOW + HOURS_48

    def test_without_overlap_the_old_secret_ends_at_once(self, acme):
        rotated = rotate(create(acme).key, overlap=timedelta(0))
        assert (rotated.key.previous_hash, rotated.key.previous_valid_until) == ("", None)

    def test_a_lost_answer_is_repeated_with_the_same_secret(self, acme):
        key = create(acme).key
        first = rotate(key)
        again = rotate(key, now=NOW + timedelta(minutes=14))
        assert again.secret == first.secret
        assert ApiKey.objects.get().live_number == first.key.live_number
        assert AuditEntry.objects.filter(action="key.rotate").count() == 1

    def test_later_the_repeat_changes_nothing_and_shows_nothing(self, acme):
        key = create(acme).key
        first = rotate(key)
        late = rotate(key, now=NOW + timedelta(minutes=16))
        assert late.secret is None and late.key.secret_hash == first.key.secret_hash

    def test_with_another_server_key_no_wrong_secret_is_shown(self, acme, settings):
        key = create(acme).key
        rotate(key)
        settings.SECRET_KEY = "another key, since the file was replaced in between"
        assert rotate(key).secret is None

    def test_a_running_overlap_is_not_cut_off_by_accident(self, acme):
        key = create(acme).key
        rotate(key)
        with pytest.raises(ValidationError) as caught:
            rotate(key, "rotation-2", now=NOW + timedelta(hours=1))
        assert list(caught.value.message_dict) == ["end_overlap"]
        third = rotate(key, "rotation-2", now=NOW + timedelta(hours=1), end_overlap=True)
        assert third.secret is not None
        after = rotate(key, "rotation-3", now=NOW + timedelta(hours=60))
        assert after.secret is not None

    @pytest.mark.parametrize("overlap", [timedelta(seconds=-1), timedelta(days=31)])
    def test_an_overlap_has_bounds(self, overlap, acme):
        with pytest.raises(ValidationError):
            rotate(create(acme).key, overlap=overlap)

    @pytest.mark.parametrize("rotation_id", ["", "short", "x" * 65])
    def test_a_rotation_has_a_name(self, rotation_id, acme):
        with pytest.raises(ValidationError):
            rotate(create(acme).key, rotation_id)


@pytest.mark.django_db(transaction=True)
def test_rotating_twice_at_once_under_one_name_rotates_once(acme):
    key = create(acme).key
    results = side_by_side(*[lambda: rotate(key) for _ in range(4)])
    assert len({result.secret for result in results}) == 1
    assert AuditEntry.objects.filter(action="key.rotate").count() == 1
    assert ApiKey.objects.get().version == 2
