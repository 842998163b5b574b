"""What is applied, what is refused and why; the live list."""

import dataclasses

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.agent.policy_state import LiveList, PolicyState, Trust
from controlplane.agent.policy_trial import trial_refusal
from controlplane.wire.policy import LiveTenant, SafeRate, SignedPolicy
from tests.agent.worlds import (
    bundle,
    class_policy,
    delta,
    document,
    flex_policy,
    live_item,
    live_key,
    rate,
    slot,
    tenant_policy,
    trust,
)

NOW_US = 1_800_000_000_000_000
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


@pytest.fixture
def state(tmp_path):
    return PolicyState(tmp_path, trial_refusal)


def refusal(state: PolicyState, doc, *, now_us: int = NOW_US, trust_: Trust | None = None, key=None) -> str:
    signed = bundle(doc) if key is None else bundle(doc, key)
    assert state.consider(*signed, trust_ or trust(), now_us=now_us) is None
    return state.refused_reason


def test_a_good_policy_is_applied_and_kept(state, tmp_path):
    signed, digest = bundle(document(3))
    assert state.consider(signed, digest, trust(), now_us=NOW_US).revision == 3
    again = PolicyState(tmp_path, trial_refusal)
    assert again.restore(trust()).revision == 3
    assert again.digest == digest


def test_accept_until_limits_first_application_never_use(state, tmp_path):
    doc = document(3, accept_until="2027-01-15T08:00:01+00:00")
    assert state.consider(*bundle(doc), trust(), now_us=NOW_US) is not None
    assert PolicyState(tmp_path, trial_refusal).restore(trust()) is not None
    late = document(4, accept_until="2027-01-15T08:00:00+00:00")
    assert "had to be applied before" in refusal(state, late)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 99}, "schema 99"),
        ({"installation": "other"}, "installation other"),
        ({"pool": {"slug": "else"}}, "pool else"),
        ({"revision": 5}, "does not grow"),
        ({"revision": 4}, "does not grow"),
        ({"not_before": "2030-01-01T00:00:00+00:00"}, "not valid before"),
        ({"not_before": "2026-01-01T00:00:00"}, "no time zone"),
        ({"classes": [class_policy(downgrade_to="ghost")]}, "ghost"),
        ({"pool": {"slots": [slot(1), slot(2, name="S1")]}}, "same name"),
        ({"tenants": [tenant_policy(weight=0)]}, "weight"),
        ({"classes": [class_policy(overload="shrug")]}, "shrug"),
        ({"pool": {"isolation": "none"}}, "cannot be applied"),
        ({"pool": {"safe_rate": SafeRate({"0": 4.0})}}, "safe rate"),
        ({"pool": {"slots": [slot(1, places=0)]}}, "at least one place"),
        ({"pool": {"flex": flex_policy(drain_bound_s=0)}}, "drain_bound_us"),
        ({"rates": [rate(prompt_nanos_per_mtok=-1)]}, "negative"),
        ({"rates": [rate(effective_from="soon")]}, "cannot be applied"),
        ({"classes": [class_policy(min_share_ppm=600_000), class_policy("bulk", kind="batch", min_share_ppm=600_000)]},
         "more than 1"),
    ],
)  # fmt: skip
def test_refused_policies_leave_the_old_one_in_force(state, changes, said):
    assert state.consider(*bundle(document(5)), trust(), now_us=NOW_US) is not None
    assert said in refusal(state, document(**{"revision": 6, **changes}))
    assert state.revision == 5
    assert state.refused_revision == changes.get("revision", 6)


def test_tampering_is_found(state):
    signed, digest = bundle(document(5))
    assert state.consider(signed, "0" * 64, trust(), now_us=NOW_US) is None
    assert "digest differs" in state.refused_reason
    assert "signature does not hold" in refusal(state, document(6), key=OTHER_KEY)
    envelope = msgspec.json.decode(signed, type=SignedPolicy)
    foreign = msgspec.json.encode(msgspec.structs.replace(envelope, kid="ffff"))
    assert state.consider(foreign, digest, trust(), now_us=NOW_US) is None
    assert "not known here" in state.refused_reason
    for broken in (b"", b"{}", signed[:-1], signed.replace(envelope.body.encode(), b"!!")):
        assert state.consider(broken, digest, trust(), now_us=NOW_US) is None


def test_a_refused_digest_is_not_pulled_again_but_one_before_its_time_is(state):
    early, digest = bundle(document(2, not_before="2030-01-01T00:00:00+00:00"))
    assert state.consider(early, digest, trust(), now_us=NOW_US) is None
    assert state.wants(2, digest)
    foreign, foreign_digest = bundle(document(3, installation="other"))
    assert state.consider(foreign, foreign_digest, trust(), now_us=NOW_US) is None
    assert not state.wants(3, foreign_digest)
    assert not state.wants(0, "aa")


def test_a_policy_of_another_trust_is_not_restored(state, tmp_path):
    assert state.consider(*bundle(document(5)), trust(), now_us=NOW_US) is not None
    assert PolicyState(tmp_path, trial_refusal).restore(dataclasses.replace(trust(), pool="else")) is None
    assert PolicyState(tmp_path, trial_refusal).restore(dataclasses.replace(trust(), signing_keys={})) is None


class TestLiveList:
    def test_keys_change_and_are_kept(self, tmp_path):
        live = LiveList(tmp_path)
        assert live.apply(delta(live_key(5)), trust())
        assert live.apply(delta(live_key(6, state="revoked", hashes=["ff"]), since=5), trust())
        assert (live.number, live.keys[11].state, set(live.by_hash)) == (6, "revoked", {"ff"})
        again = LiveList(tmp_path)
        again.restore(trust())
        assert (again.number, again.keys[11].state) == (6, "revoked")

    def test_a_gap_is_left_and_a_full_list_replaces(self, tmp_path):
        live = LiveList(tmp_path)
        assert not live.apply(delta(live_key(9), since=7), trust())
        assert live.number == 0
        tenant = LiveTenant(8, 1, "acme", "suspended")
        assert live.apply(delta(live_key(9), tenant, full=True), trust())
        assert live.apply(delta(LiveTenant(10, 2, "delta", "active"), full=True), trust())
        assert (live.number, live.keys, set(live.tenants)) == (10, {}, {2})

    def test_an_entry_that_does_not_verify_stops_the_delta(self, tmp_path):
        live = LiveList(tmp_path)
        assert live.apply(delta(live_key(1)), trust())
        forged = msgspec.structs.replace(
            delta(LiveTenant(2, 1, "acme", "suspended"), since=1),
            entries=[live_item(LiveTenant(2, 1, "acme", "suspended"), key=OTHER_KEY)],
        )
        assert not live.apply(forged, trust())
        assert (live.number, live.tenants, list(live.keys)) == (1, {}, [11])
        assert "does not hold" in live.problem
        renumbered = msgspec.structs.replace(forged, entries=[live_item(LiveTenant(3, 1, "acme", "x"), number=2)])
        assert not live.apply(renumbered, trust())
        assert list(live.keys) == [11]

    def test_a_nudge_puts_entries_in_force_and_leaves_the_number_to_reports(self, tmp_path):
        live = LiveList(tmp_path)
        assert live.apply(delta(live_key(1)), trust())
        stops = [live_item(live_key(5, state="revoked")), live_item(LiveTenant(4, 1, "acme", "suspended"))]
        assert live.hasten(stops, trust())
        assert (live.number, live.keys[11].state, live.tenants[1].state) == (1, "revoked", "suspended")
        assert not live.hasten(stops, trust()), "nothing is new"
        # an answer that was on its way when the nudge came is older: it takes nothing back, and the rest of it counts
        assert live.apply(delta(live_key(2), LiveTenant(3, 2, "delta", "suspended"), since=1), trust())
        assert (live.number, live.keys[11].state, set(live.tenants)) == (3, "revoked", {1, 2})
        assert live.apply(delta(LiveTenant(4, 1, "acme", "suspended"), live_key(5, state="revoked"), since=3), trust())
        assert live.number == 5

    def test_a_nudge_takes_nothing_back_and_needs_signatures(self, tmp_path):
        live = LiveList(tmp_path)
        assert live.apply(delta(LiveTenant(6, 1, "acme", "suspended")), trust())
        assert not live.hasten([live_item(LiveTenant(5, 1, "acme", "active"))], trust()), "a replay"
        assert not live.hasten([live_item(LiveTenant(7, 1, "acme", "active"), key=OTHER_KEY)], trust())
        assert (live.number, live.tenants[1].state) == (6, "suspended")


def test_an_unknown_key_is_named_and_what_is_in_force_stays(tmp_path):
    """After a rotation the old key is not trusted any more: entries taken under it stay, whatever comes next."""
    live = LiveList(tmp_path)
    assert live.apply(delta(live_key(1)), trust())
    rotated = Trust(trust().installation, trust().pool, {})
    assert not live.apply(delta(live_key(2), since=1), rotated)
    assert live.unknown_kid == live_item(live_key(2)).kid
    assert live.number == 1 and list(live.keys) == [11] and live.by_hash
    assert not live.apply(delta(live_key(1)), rotated)
    assert live.unknown_kid == "", "a delta that is not needed asks for nothing"


def test_a_bundle_under_an_unknown_key_names_it(state):
    doc = document(3)
    untrusting = Trust(doc.installation, doc.pool.slug, {})
    assert "not known here" in refusal(state, doc, trust_=untrusting)
    digest = bundle(doc)[1]
    assert state.unknown_kid and not state.wants(3, digest)
    state.forget_refusal()
    assert state.refused_revision is None and state.wants(3, digest)
    assert state.consider(*bundle(doc), trust(), now_us=NOW_US) is not None
    assert state.unknown_kid == ""
