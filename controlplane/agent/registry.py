"""Keys, tenants and classes as admission looks at them: long-lived views that policy, live list and shares change."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

from controlplane.agent.answers import header_text
from controlplane.agent.policy_state import LiveList, instant_us
from controlplane.agent.tokenless_time import TokenlessTime
from controlplane.core.admission_snapshot import (
    ClassView,
    KeyState,
    KeyView,
    OutagePosture,
    Overload,
    TenantView,
)
from controlplane.core.estimate import DemandEstimate, WorkRates
from controlplane.core.pricing import RateCard
from controlplane.core.reservations import MICRO, ConcurrencyCounter, TokenBucket
from controlplane.core.slots import ClassKind
from controlplane.wire.policy import ClassPolicy, LiveKey, PolicyDocument, TenantPolicy
from controlplane.wire.report import Share

ACTIVE = "active"
REQUEST_BURST_S = 2
FREE_CARD: Final = RateCard(0, 0, 0)
PRESENTED_MAX = 4_096


class ClassEntry:
    """A workload class with what is derived from its policy once.

    Requests read these fields: compiled code reads those of a message through the interpreter.
    """

    __slots__ = (
        "deadline_us", "id", "is_batch", "max_output_tokens", "output_tokens", "policy", "safe_to_repeat", "slug",
        "slug_text", "stage_timeout_us", "view",
    )  # fmt: skip

    def __init__(self, policy: ClassPolicy) -> None:
        self.view = ClassView(policy.slug)
        self.take(policy)

    def take(self, policy: ClassPolicy) -> None:
        self.policy = policy
        self.id = policy.id
        self.slug = policy.slug
        self.is_batch = policy.kind == ClassKind.BATCH
        self.max_output_tokens = policy.max_output_tokens
        self.output_tokens = min(policy.default_output_tokens, policy.max_output_tokens)
        """Of a request that names no limit."""
        self.safe_to_repeat = policy.retry_safe and policy.cancellable
        self.deadline_us = policy.default_deadline_s * 1_000_000
        """After arrival, of batch that names none."""
        self.slug_text = header_text(policy.slug)
        """The slug as headers carry it."""
        self.stage_timeout_us = policy.stage_timeout_s * 1_000_000
        view = self.view
        view.max_prompt_tokens = policy.max_prompt_tokens
        view.max_output_tokens = policy.max_output_tokens
        view.max_queue = policy.max_queue
        view.max_wait_us = policy.max_wait_ms * 1000
        view.overload = Overload(policy.overload)
        view.models = frozenset(policy.models) or None


class TenantEntry:
    """A tenant; `posture` is what its requests meet when neither lease nor control plane is there."""

    __slots__ = ("estimates", "hard_budget", "id", "policy", "posture", "slug", "view")

    def __init__(self, policy: TenantPolicy) -> None:
        self.estimates: dict[str, DemandEstimate] = {}
        """Those of the registry, by class, once a request asked."""
        self.view = TenantView(policy.slug, concurrency=ConcurrencyCounter(policy.max_concurrency))
        self.take(policy)

    def take(self, policy: TenantPolicy) -> None:
        self.policy = policy
        self.id = policy.id
        self.slug = policy.slug
        self.hard_budget = policy.hard_budget
        self.posture = OutagePosture(policy.outage_posture)
        self.view.classes = frozenset(policy.classes)
        self.view.models = frozenset(policy.models) or None


class KeyEntry:
    """An API key; the view keeps its counters when the key changes."""

    __slots__ = ("live", "view")

    def __init__(self, live: LiveKey) -> None:
        self.view = KeyView()
        self.take(live)

    def take(self, live: LiveKey) -> None:
        self.live = live
        self.view.state = KeyState.ACTIVE if live.state == ACTIVE else KeyState.REVOKED
        self.view.expires_at_us = live.expires_us
        self.view.classes = frozenset(live.classes)


class DatedCard:
    """A rate card with the instant from which it prices arrivals."""

    __slots__ = ("card", "from_us")

    def __init__(self, from_us: int, card: RateCard) -> None:
        self.from_us = from_us
        self.card = card


class Registry:
    """Everything admission looks up. Empty until the first policy is applied."""

    def __init__(self) -> None:
        self.document: PolicyDocument | None = None
        self.knows_keys = False
        """The live list is whole and names a key: one that is not here is unknown, and not only late."""
        self.classes: dict[str, ClassEntry] = {}
        self.tenants: dict[int, TenantEntry] = {}
        self.keys: dict[int, KeyEntry] = {}
        self.by_hash: dict[str, KeyEntry] = {}
        self._presented: dict[bytes, KeyEntry] = {}
        """Keys by their present secrets, once presented: hashing those again and again is what a request costs most
        for its key. Forgotten with every live list, and when there are too many."""
        self.rates = WorkRates(0, 0)
        self.tokenless_time = TokenlessTime()
        self.shares: dict[tuple[str, int], Share] = {}
        self._cards: dict[str, list[DatedCard]] = {}
        self.estimates: dict[tuple[int, int], DemandEstimate] = {}
        """(tenant id, class id) -> what its requests turned out to be."""
        self._safe_rate_per_s: float | None = None

    # What changes it

    def apply_policy(self, document: PolicyDocument, live: LiveList, now_us: int) -> None:
        """Take a whole revision; what is spent and counted stays."""
        self.take(document)
        self.apply_live(live, now_us)

    def take(self, document: PolicyDocument) -> None:
        """What a revision says of rates, classes, tenants and prices."""
        self.document = document
        self.rates = WorkRates(document.pool.prefill_us_per_token, document.pool.decode_us_per_token)
        for policy in document.classes:
            entry = self.classes.get(policy.slug)
            if entry is None:
                self.classes[policy.slug] = ClassEntry(policy)
            else:
                entry.take(policy)
        for slug in self.classes.keys() - {policy.slug for policy in document.classes}:
            del self.classes[slug]
        for tenant in document.tenants:
            known = self.tenants.get(tenant.id)
            if known is None:
                self.tenants[tenant.id] = TenantEntry(tenant)
            else:
                known.take(tenant)
        for tenant_id in self.tenants.keys() - {tenant.id for tenant in document.tenants}:
            del self.tenants[tenant_id]
        for one in self.tenants.values():
            # A class of the same name may be another one now.
            one.estimates.clear()
        self._cards = {}
        for rate in sorted(document.rates, key=lambda rate: instant_us(rate.effective_from)):
            card = RateCard(
                rate.prompt_nanos_per_mtok,
                rate.cached_nanos_per_mtok,
                rate.output_nanos_per_mtok,
                rate.gpu_nanos_per_slot_hour or None,
                rate.discount_ppm,
                rate.rate_version,
            )
            self._cards.setdefault(rate.class_slug, []).append(DatedCard(instant_us(rate.effective_from), card))

    def apply_live(self, live: LiveList, now_us: int) -> None:
        """Take the live list: it wins over the revision."""
        self.knows_keys = live.whole and bool(live.keys)
        for key_id, key in live.keys.items():
            entry = self.keys.get(key_id)
            if entry is None:
                self.keys[key_id] = KeyEntry(key)
            elif entry.live is not key:
                entry.take(key)
        for key_id in self.keys.keys() - live.keys.keys():
            del self.keys[key_id]
        self._presented.clear()
        self.by_hash = {digest: self.keys[key.id] for digest, key in live.by_hash.items()}
        for tenant_id, tenant in self.tenants.items():
            said = live.tenants.get(tenant_id)
            tenant.view.active = said is None or said.state == ACTIVE
        for workload_class in self.classes.values():
            state = live.classes.get(workload_class.policy.id)
            workload_class.view.active = state is None or state.state == ACTIVE
        self.apply_shares(list(self.shares.values()), now_us)

    def apply_shares(self, shares: list[Share], now_us: int) -> None:
        """This agent's parts of installation-wide limits; what is not named keeps its last part."""
        for share in shares:
            self.shares[share.scope, share.id] = share
        for tenant_id, tenant in self.tenants.items():
            share_of = self.shares.get(("tenant", tenant_id))
            limit = tenant.policy.max_concurrency if share_of is None else share_of.concurrency
            counter = tenant.view.concurrency
            if counter is not None:
                counter.limit = limit
            if share_of is not None:
                view = tenant.view
                view.request_bucket = _request_bucket(view.request_bucket, share_of.requests_per_s, now_us)
                view.token_bucket = _token_bucket(view.token_bucket, share_of.tokens_per_minute, now_us)
        for key_id, key in self.keys.items():
            self._limit_key(key_id, key, now_us)
        self._limit_classes(now_us)

    def set_safe_rate(self, per_s: float | None, now_us: int) -> None:
        """The part of the pool's tested rate that this agent's slots carry now; None where nothing was tested."""
        if per_s != self._safe_rate_per_s:
            self._safe_rate_per_s = per_s
            self._limit_classes(now_us)

    def _limit_key(self, key_id: int, key: KeyEntry, now_us: int) -> None:
        share, live, view = self.shares.get(("key", key_id)), key.live, key.view
        concurrency = live.max_concurrency if share is None else share.concurrency
        if view.concurrency is None:
            view.concurrency = ConcurrencyCounter(concurrency)
        view.concurrency.limit = concurrency
        requests = live.requests_per_s if share is None else share.requests_per_s
        tokens = live.tokens_per_minute if share is None else share.tokens_per_minute
        view.request_bucket = _request_bucket(view.request_bucket, requests, now_us)
        view.token_bucket = _token_bucket(view.token_bucket, tokens, now_us)

    def _limit_classes(self, now_us: int) -> None:
        document = self.document
        for slug, entry in self.classes.items():
            share = self.shares.get(("class", entry.policy.id))
            rate = None if share is None else share.requests_per_s
            if rate is None and document is not None and slug == document.pool.interactive_class:
                rate = self._safe_rate_per_s
            entry.view.rate_bucket = _request_bucket(entry.view.rate_bucket, rate, now_us)

    # What is looked up

    @property
    def model(self) -> str:
        """The model of the policy in force, empty before there is one."""
        return "" if self.document is None else self.document.pool.model

    def key_of(self, secret: bytes, now_us: int) -> KeyEntry | None:
        """The key whose present secret, or previous one in its time of overlap, that is."""
        entry = self._presented.get(secret)
        if entry is not None:
            return entry
        digest = sha256(secret).hexdigest()
        entry = self.by_hash.get(digest)
        if entry is None:
            return None
        if entry.live.hashes[0] == digest:
            if len(self._presented) >= PRESENTED_MAX:
                self._presented.clear()
            self._presented[secret] = entry
            return entry
        until = entry.live.previous_until_us
        return None if until is None or now_us >= until else entry

    def card_at(self, class_slug: str, now_us: int) -> RateCard:
        """The card in force for arrivals at an instant; a class without one costs nothing (rate_version 0)."""
        found = FREE_CARD
        if not self._cards:
            return found
        cards = self._cards.get(class_slug)
        if cards is not None:
            for dated in cards:
                if dated.from_us > now_us:
                    break
                found = dated.card
        return found

    def estimate_of(self, tenant_id: int, class_id: int) -> DemandEstimate:
        """What that tenant's requests of that class have turned out to be."""
        estimate = self.estimates.get((tenant_id, class_id))
        if estimate is None:
            estimate = self.estimates[tenant_id, class_id] = DemandEstimate()
        return estimate

    def estimate_for(self, tenant: TenantEntry, klass: ClassEntry) -> DemandEstimate:
        """The same by its entries: found at once from the second time on."""
        estimate = tenant.estimates.get(klass.slug)
        if estimate is None:
            estimate = tenant.estimates[klass.slug] = self.estimate_of(tenant.id, klass.id)
        return estimate

    def is_batch(self, class_slug: str) -> bool:
        """Whether the class is one of batch; False for one that is unknown."""
        entry = self.classes.get(class_slug)
        return entry is not None and entry.is_batch

    def class_id(self, slug: str) -> int:
        """The class's number; 0 for one that is unknown."""
        entry = self.classes.get(slug)
        return 0 if entry is None else entry.policy.id

    def tenant_slug(self, tenant_id: int) -> str | None:
        """The tenant's name; None for one that the policy does not have."""
        entry = self.tenants.get(tenant_id)
        return None if entry is None else entry.policy.slug


def _request_bucket(bucket: TokenBucket | None, per_s: float | None, now_us: int) -> TokenBucket | None:
    if per_s is None:
        return None
    rate = max(0, round(per_s * MICRO))
    return _bucket(bucket, rate, max(MICRO, REQUEST_BURST_S * rate), now_us)


def _token_bucket(bucket: TokenBucket | None, per_minute: int | None, now_us: int) -> TokenBucket | None:
    if per_minute is None:
        return None
    return _bucket(bucket, per_minute * MICRO // 60, per_minute * MICRO, now_us)


def _bucket(bucket: TokenBucket | None, rate_micro: int, burst_micro: int, now_us: int) -> TokenBucket:
    if bucket is None:
        return TokenBucket(rate_micro_per_s=rate_micro, burst_micro=burst_micro, now_us=now_us)
    if bucket.rate_micro_per_s != rate_micro:
        bucket.set_rate(rate_micro_per_s=rate_micro, burst_micro=burst_micro, now_us=now_us)
    return bucket
