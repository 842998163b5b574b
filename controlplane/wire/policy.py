"""The policy document of one pool, its signed envelope, live-list entries and nudges: parsed once, at the edge."""

from msgspec import Struct

from controlplane.wire.report import LiveItem

SCHEMA = 1


class SizeBounds(Struct, frozen=True):
    """Where one size of request ends and the next begins (GPU time), when one that waits goes first, and when memory
    is kept for it."""

    gpu_ms: list[int]
    aging_s: int
    reserve_after_ms: int


class FlexPolicy(Struct, frozen=True):
    """Units are in the names; `max_lent` null is all flex slots."""

    lend_p95_ms: int
    lend_hold_s: int
    load_limit: float
    lend_slack: float
    return_slack: float
    return_hold_s: int
    min_hold_s: int
    drain_bound_s: int
    grant_ttl_s: int
    cooldown_s: int
    decision_interval_s: int
    max_lent: int | None
    spillover_per_week: int
    spillover_action: str


class SafeRate(Struct, frozen=True):
    """Tested interactive requests/s by slots that serve interactive; linear between entries."""

    entries: dict[str, float]
    measured_at: str = ""
    trace: str = ""
    valid_until: str = ""


class Batching(Struct, frozen=True):
    """How requests of a one-shot model are run together; a size of 1 is off. The size counts inputs."""

    max_batch_size: int = 1
    max_wait_ms: int = 0


class SlotPolicy(Struct, frozen=True):
    """A slot: how many requests it runs at once (`places`), its KV memory in tokens, and the agent that runs it."""

    id: int
    name: str
    band: str
    places: int
    kv_tokens: int
    agent_id: int | None


class PoolPolicy(Struct, frozen=True):
    """One pool and its slots. Weights say how many units of fairness a prompt and an output token count."""

    id: int
    slug: str
    model: str
    model_id: int
    isolation: str
    interactive_class: str
    batch_class: str
    fairness_unit: str
    prompt_weight: int
    output_weight: int
    sizes: SizeBounds
    prefill_us_per_token: int
    decode_us_per_token: int
    flex: FlexPolicy
    safe_rate: SafeRate
    slots: list[SlotPolicy]
    batching: Batching = Batching()


class ClassPolicy(Struct, frozen=True):
    """A workload class in this pool; `downgrade_to` is a class of the same pool, or null.

    `priority` is for engines that schedule by one: a lower number is served earlier, as vLLM and Triton count.
    """

    id: int
    slug: str
    kind: str
    priority: int
    min_share_ppm: int
    max_prompt_tokens: int
    max_output_tokens: int
    default_output_tokens: int
    template_allowance_tokens: int
    max_queue: int
    max_wait_ms: int
    stage_timeout_s: int
    overload: str
    downgrade_to: str | None
    retry_safe: bool
    cancellable: bool
    default_deadline_s: int
    models: list[str]


class TenantPolicy(Struct, frozen=True, gc=False):
    """`hard_budget` says that admission needs a lease."""

    id: int
    slug: str
    weight: int
    max_concurrency: int
    classes: list[str]
    models: list[str]
    outage_posture: str
    hard_budget: bool
    ancestors: list[int]


class ContractPolicy(Struct, frozen=True, gc=False):
    """A contract version; `tenant_id` null is everyone in the class."""

    version_id: int
    slug: str
    class_id: int
    tenant_id: int | None
    effective_from: str
    objective: str
    metric: str
    threshold_ms: int


class RatePolicy(Struct, frozen=True):
    """Prices of a class and model from an instant on: nanos per million tokens and per slot-hour."""

    rate_version: int
    class_slug: str
    model_id: int
    effective_from: str
    prompt_nanos_per_mtok: int
    cached_nanos_per_mtok: int
    output_nanos_per_mtok: int
    gpu_nanos_per_slot_hour: int
    discount_ppm: int


class PolicyDocument(Struct, frozen=True):
    """Compiled for one pool with only what that pool needs. The agent applies a revision that only grows."""

    schema: int
    installation: str
    revision: int
    not_before: str
    accept_until: str
    pool: PoolPolicy
    classes: list[ClassPolicy]
    tenants: list[TenantPolicy]
    contracts: list[ContractPolicy]
    rates: list[RatePolicy]


class SignedPolicy(Struct, frozen=True):
    """The envelope that is pulled: `body` is base64 of the canonical document; the signature covers
    `header_message(...)`, so installation, pool, revision and digest cannot be swapped."""

    kid: str
    signature: str
    body: str


class LiveKey(Struct, frozen=True, tag="key", tag_field="kind"):
    """An API key as agents know it: hashes (SHA-256 hex) of its present and, until an instant, previous secret."""

    number: int
    id: int
    public_id: str
    tenant_id: int
    state: str
    hashes: list[str]
    previous_until_us: int | None
    expires_us: int | None
    classes: list[str]
    default_class: str
    max_concurrency: int | None
    requests_per_s: float | None
    tokens_per_minute: int | None


class LiveTenant(Struct, frozen=True, tag="tenant", tag_field="kind"):
    """A tenant that was suspended, or let in again."""

    number: int
    id: int
    slug: str
    state: str


class LiveClass(Struct, frozen=True, tag="class", tag_field="kind"):
    """A class that was suspended, or let in again."""

    number: int
    id: int
    slug: str
    state: str


class LiveFreeze(Struct, frozen=True, tag="freeze", tag_field="kind"):
    """No new loans in a pool until an instant; null ends the freeze."""

    number: int
    pool_id: int
    frozen_until_us: int | None


LiveBody = LiveKey | LiveTenant | LiveClass | LiveFreeze


class Nudge(Struct, frozen=True, omit_defaults=True):
    """Hastens what the next report would bring anyway. kind: policy, recall, grant, lease, live or report.

    `live` has the signed entries that stop something, so that they are in force before the report has been answered.
    """

    kind: str
    pool: str
    agent: str | None
    slot_id: int | None
    fence: int | None
    revision: int | None
    digest: str | None
    wave: int | None
    nonce: str
    issued_us: int
    expires_us: int
    live: list[LiveItem] | None = None


class SignedNudge(Struct, frozen=True):
    """The envelope of a nudge: `body` is base64 of its canonical JSON."""

    kid: str
    signature: str
    body: str


def policy_message(*, installation: str, pool: str, revision: int, digest: str, accept_until: str) -> bytes:
    """What the policy key signs."""
    return f"policy\n{installation}\n{pool}\n{revision}\n{digest}\n{accept_until}".encode()


def document_message(document: PolicyDocument, digest: str) -> bytes:
    """What the policy key signs for a document whose canonical form has this digest."""
    return policy_message(
        installation=document.installation,
        pool=document.pool.slug,
        revision=document.revision,
        digest=digest,
        accept_until=document.accept_until,
    )


def live_message(*, installation: str, number: int, digest: str) -> bytes:
    """What the live key signs for one entry."""
    return f"live\n{installation}\n{number}\n{digest}".encode()


def nudge_message(*, installation: str, digest: str) -> bytes:
    """What the nudge key signs."""
    return f"nudge\n{installation}\n{digest}".encode()
