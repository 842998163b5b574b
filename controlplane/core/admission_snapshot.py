"""What one admission decision looks at: key, tenant, class, budget and queue as the agent knows them at an instant.

The views are long-lived objects of the agent that live-list and policy updates change in place; a `Snapshot` refers to
them and adds what belongs to the one request, so that taking it costs no copies on the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.core.native import native
from controlplane.core.pricing import RateCard
from controlplane.core.reservations import ConcurrencyCounter, LeasePurse, TokenBucket


class Overload(StrEnum):
    """What a class does when its queue bounds are reached."""

    REJECT = "reject"
    QUEUE = "queue"
    DOWNGRADE = "downgrade"
    CANCEL = "cancel"


class KeyState(StrEnum):
    """State of an API key; expiry is an instant beside it."""

    ACTIVE = "active"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


class OutagePosture(StrEnum):
    """What a tenant's requests meet when neither a lease nor the control plane is there."""

    CLOSED = "closed"
    OPEN = "open"


class LeaseState(StrEnum):
    """Where the tenant's hard budget stands on this agent."""

    HELD = "held"
    """A lease is here, and the control plane can be asked for more."""
    ABSENT = "absent"
    """No lease, and none was answered in time."""
    CUT_OFF = "cut_off"
    """The control plane is out of reach; what is left of the lease is all there is."""
    EXHAUSTED = "exhausted"
    """The control plane granted nothing: the budget is used up."""


@dataclass(slots=True)
class KeyView:
    """An API key as the agent knows it; None for a set means that the key does not narrow it."""

    state: KeyState = KeyState.ACTIVE
    expires_at_us: int | None = None
    classes: frozenset[str] | None = None
    models: frozenset[str] | None = None
    concurrency: ConcurrencyCounter | None = None
    request_bucket: TokenBucket | None = None
    token_bucket: TokenBucket | None = None


@dataclass(slots=True)
class TenantView:
    """A tenant as the agent knows it."""

    slug: str
    active: bool = True
    classes: frozenset[str] | None = None
    models: frozenset[str] | None = None
    concurrency: ConcurrencyCounter | None = None
    request_bucket: TokenBucket | None = None
    token_bucket: TokenBucket | None = None


@dataclass(slots=True)
class ClassView:
    """The admission side of a workload class; a bound of None is no bound."""

    slug: str
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    max_queue: int | None = None
    max_wait_us: int | None = None
    overload: Overload = Overload.REJECT
    active: bool = True
    models: frozenset[str] | None = None
    rate_bucket: TokenBucket | None = None


class BudgetView:
    """The tenant's hard budget on this agent; a tenant without one has no BudgetView at all."""

    __slots__ = ("outage_purse", "posture", "purse", "state", "window_ends_at_us")

    def __init__(
        self,
        purse: LeasePurse | None,
        state: LeaseState = LeaseState.HELD,
        posture: OutagePosture = OutagePosture.CLOSED,
        outage_purse: LeasePurse | None = None,
        window_ends_at_us: int | None = None,
    ) -> None:
        self.purse = purse
        self.state = state
        self.posture = posture
        self.outage_purse = outage_purse
        self.window_ends_at_us = window_ends_at_us


@native(free_list_len=1, acyclic=True)
class Snapshot:
    """Everything one decision looks at.

    `prompt_tokens` is the estimate that checks use, `prompt_bound_tokens` the bound that money uses (bytes where no
    tokenizer answered). `expected_output_tokens` None means max_output_tokens. KV figures are tokens; None means that
    the pool's backends have no KV memory. `displaceable_id` names the newest queued request of strictly lower
    precedence, None when there is none.
    """

    __slots__ = (
        "budget", "card", "displaceable_id", "expected_output_tokens", "first_free_us", "free_kv_tokens", "free_now",
        "key", "largest_slot_kv_tokens", "max_output_tokens", "model", "n", "now_us", "prompt_bound_tokens",
        "prompt_tokens", "queue_depth", "serving_slots", "stage_timeout_us", "tenant", "work_ahead_gpu_us",
        "workload_class",
    )  # fmt: skip

    def __init__(
        self,
        now_us: int,
        key: KeyView,
        tenant: TenantView,
        workload_class: ClassView,
        card: RateCard,
        budget: BudgetView | None = None,
        model: str | None = None,
        prompt_tokens: int = 0,
        prompt_bound_tokens: int = 0,
        max_output_tokens: int = 0,
        expected_output_tokens: int | None = None,
        n: int = 1,
        stage_timeout_us: int = 0,
        queue_depth: int = 0,
        work_ahead_gpu_us: int = 0,
        first_free_us: int = 0,
        serving_slots: int = 1,
        free_now: bool = False,
        displaceable_id: str | int | None = None,
        largest_slot_kv_tokens: int | None = None,
        free_kv_tokens: int | None = None,
    ) -> None:
        self.now_us = now_us
        self.key = key
        self.tenant = tenant
        self.workload_class = workload_class
        self.card = card
        self.budget = budget
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.prompt_bound_tokens = prompt_bound_tokens
        self.max_output_tokens = max_output_tokens
        self.expected_output_tokens = expected_output_tokens
        self.n = n
        self.stage_timeout_us = stage_timeout_us
        self.queue_depth = queue_depth
        self.work_ahead_gpu_us = work_ahead_gpu_us
        self.first_free_us = first_free_us
        self.serving_slots = serving_slots
        self.free_now = free_now
        self.displaceable_id = displaceable_id
        self.largest_slot_kv_tokens = largest_slot_kv_tokens
        self.free_kv_tokens = free_kv_tokens
