"""The terms of many pools are one look at the database, and a revision that nobody can read takes no other with it."""

from __future__ import annotations

import msgspec
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from controlplane.exchange.safe_rates import TermsOfPools
from controlplane.wire.policy import FlexPolicy, PoolPolicy, SafeRate, SizeBounds, SlotPolicy
from tests import factories
from tests.exchange.test_answers import bundle

pytestmark = pytest.mark.django_db


def readable(pool, rate: float) -> bytes:
    """A policy document as far as terms read it."""
    flex = FlexPolicy(
        lend_p95_ms=500, lend_hold_s=60, load_limit=0.8, lend_slack=0.2, return_slack=0.1, return_hold_s=5,
        min_hold_s=30, drain_bound_s=60, grant_ttl_s=30, cooldown_s=60, decision_interval_s=1, max_lent=None,
        spillover_per_week=0, spillover_action="allow",
    )  # fmt: skip
    policy = PoolPolicy(
        id=pool.pk, slug=pool.slug, model="m", model_id=1, isolation="exclusive", interactive_class="chat",
        batch_class="bulk", fairness_unit="tokens", prompt_weight=1, output_weight=1, sizes=SizeBounds([1], 1, 1),
        prefill_us_per_token=1, decode_us_per_token=1, flex=flex, safe_rate=SafeRate({"1": rate}),
        slots=[SlotPolicy(1, "s1", "interactive", 1, 1, None)],
    )  # fmt: skip
    return msgspec.json.encode({"pool": policy, "classes": []})


def tables(found, pools) -> list[float | None]:
    terms = [found[pool.pk] for pool in pools]
    return [None if one is None else one.safe_rate.entries[0][1] for one in terms]


def test_the_terms_of_many_pools_are_read_at_once():
    pools = [factories.pool(f"pool-{number}") for number in range(6)]
    for number, pool in enumerate(pools[:5]):
        bundle(pool, readable(pool, 10.0 + number))
    with CaptureQueriesContext(
        connection,
    ) as queries:
        found = TermsOfPools().of("test", [pool.pk for pool in pools])
    assert tables(found, pools) == [10.0, 11.0, 12.0, 13.0, 14.0, None]
    assert len(queries) == 2


def test_a_revision_that_cannot_be_read_leaves_the_others_their_terms(caplog):
    pools = [factories.pool(f"pool-{number}") for number in range(3)]
    for pool, body in zip(pools, (readable(pools[0], 10.0), b'{"older":1}', readable(pools[2], 12.0)), strict=True):
        bundle(pool, body)
    found = TermsOfPools().of("test", [pool.pk for pool in pools])
    assert tables(found, pools) == [10.0, None, 12.0]
    assert f"the revision of pool {pools[1].pk} cannot be read" in caplog.text
