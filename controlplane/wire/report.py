"""What an agent reports and what it is answered. Golden files pin the bytes.

Times are Unix microseconds of the agent's wall clock corrected by nothing; durations come from its monotonic clock.
Rows are arrays (`array_like`) so that a report of many records stays small. Every report is an increment: counts and
GPU time are what was added since the report before it.
"""

from msgspec import Raw, Struct

from controlplane.wire.clock import ClockReading

LAYOUT = 1


class UsageRow(Struct, array_like=True, frozen=True, gc=False):
    """One closed attempt; the order of fields is the wire layout 1. -1 stands for unknown in `*_us` and `slot_id`.

    `job` is the UUID from `x-flexband-job`, or empty; `client_request_id` at most 128 characters.
    """

    request_id: str
    arrived_us: int
    ended_us: int
    attempt: int
    slot_id: int
    tenant_id: int
    key_id: int
    class_id: int
    asked_class_id: int
    model_id: int
    job: str
    revision: int
    rate_version: int
    outcome: int
    status: int
    flags: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    admission_us: int
    queue_us: int
    batch_wait_us: int
    preprocess_us: int
    prefill_us: int
    decode_us: int
    return_us: int
    ttft_us: int
    gpu_us: int
    estimated_gpu_us: int
    charge_prompt_nanos: int
    charge_cached_nanos: int
    charge_output_nanos: int
    charge_gpu_nanos: int
    client_request_id: str = ""


FLAG_STREAMED = 1
FLAG_ESTIMATED = 2
FLAG_NOT_CHARGED = 4
FLAG_OUTAGE = 8
"""Admitted from the tenant's outage slice: neither the control plane nor a lease was there."""
FLAG_TOKENLESS = 16
"""The work is not made of tokens (tensors in, tensors out): its counts of 0 are none, not zero."""
FLAG_CAPPED = 32
"""The engine produced more than was reserved: the charge ends at the reservation, the platform bears the rest."""


class SlotUsage(Struct, array_like=True, frozen=True):
    """GPU time one tenant and class got on one slot in one UTC minute (its start in Unix microseconds)."""

    slot_id: int
    minute_us: int
    tenant_id: int
    class_id: int
    charged: bool
    gpu_us: int


class SlotMeter(Struct, array_like=True, frozen=True):
    """What the slot's meter saw in one UTC minute: busy, observed, warming and broken time."""

    slot_id: int
    minute_us: int
    busy_us: int
    observed_us: int
    warming_us: int = 0
    broken_us: int = 0


class ObjectiveCount(Struct, array_like=True, frozen=True):
    """Counts of one contract version by minute of arrival."""

    contract_version_id: int
    minute_us: int
    offered: int
    admitted: int
    successful: int
    good: int
    neutral: int
    bad: dict[str, int]


class RefusalCount(Struct, array_like=True, frozen=True):
    """Refused requests by minute of arrival; `reason` is a code of `core.reasons`, ids are 0 where unknown."""

    minute_us: int
    tenant_id: int
    class_id: int
    reason: int
    count: int


class Check(Struct, array_like=True, frozen=True):
    """One step of a decision, as a person reads it: values carry their units."""

    name: str
    value: str
    limit: str
    held: bool


class DecisionSample(Struct, frozen=True):
    """An admission decision kept in full; `reason` is a code of `core.reasons`, 0 for none."""

    request_id: str
    at_us: int
    tenant_id: int
    key_id: int
    class_id: int
    decision: str
    reason: int
    checks: list[Check]


class LeaseSpend(Struct, array_like=True, frozen=True):
    """Spent and reserved of a lease so far (totals, not increments)."""

    lease_id: int
    spent_nanos: int
    reserved_nanos: int


class Trip(Struct, frozen=True):
    """An agent took a slot home by itself: the cause and its value, in the cause's own unit."""

    slot_id: int
    fence: int
    at_us: int
    reason: str
    value: float


class SlotLive(Struct, frozen=True):
    """A slot now. `state` is the engine's (ready, warming, broken, draining); `flex` the grant's state machine's.

    Drain instants are Unix microseconds, null until they happen.
    """

    slot_id: int
    state: str
    flex: str
    fence: int
    running: int
    running_batch: int
    running_batch_gpu_us: int
    free_kv_tokens: int
    total_kv_tokens: int
    stop_admit_us: int | None = None
    last_token_us: int | None = None
    home_us: int | None = None


class DirectWork(Struct, array_like=True, frozen=True):
    """Estimated GPU time of batch requests that clients sent themselves and that have not ended, due at one instant.

    `job` is what they name in `x-flexband-job`, empty for nothing: a running job counts its requests itself.
    """

    job: str
    due_us: int
    gpu_us: int


class ClassLive(Struct, frozen=True):
    """A class on this agent now. Rates are over the last 5 min; `wait_60s` and `ttft_60s` are sparse histograms
    ([index, count], scale 4) of the last 60 s; waits include the ages of those still waiting and refusals at max_wait.

    `direct` is what of a batch class is not leased items; nothing from older agents.
    """

    class_id: int
    depth: int
    oldest_age_us: int | None
    running: int
    head_request_id: str
    head_reason: str
    arrivals_per_s: float
    departures_per_s: float
    admitted_per_s_60s: float
    residence_mean_us: int | None
    present_mean: float
    departures: int
    refused_60s: dict[str, int]
    wait_60s: list[tuple[int, int]]
    ttft_60s: list[tuple[int, int]]
    direct: list[DirectWork] = []


class TenantLive(Struct, frozen=True):
    """A tenant in one class on this agent now; `counter` is its fair-share counter, rates are over the last 5 min.

    `bias` multiplies estimates of GPU time, `expected_output` is in tokens per choice; these and `tokens_per_byte` are
    learnt from what completed here, null while nothing was learnt, and from older agents.
    """

    class_id: int
    tenant_id: int
    depth: int
    oldest_age_us: int | None
    running: int
    counter: float
    arrivals_per_s: float
    departures_per_s: float
    residence_mean_us: int | None
    present_mean: float
    bias: float | None = None
    expected_output: float | None = None
    tokens_per_byte: float | None = None


class EngineLive(Struct, frozen=True):
    """What the inference server says of itself, as far as it does; null is unknown, never zero.

    `kv_used` is 0 to 1, of several engines the fullest. `inferences` and `executions` are counters of a server that
    batches by itself, since the agent watches it.
    """

    engine: str
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    inferences: int | None = None
    executions: int | None = None


class LiveFigures(Struct, frozen=True):
    """Everything that is shown live and lent by, as of `at_us`. `engine` is null where the server tells nothing, and
    from older agents.
    """

    at_us: int
    slots: list[SlotLive]
    classes: list[ClassLive]
    tenants: list[TenantLive]
    engine: EngineLive | None = None


class Demand(Struct, array_like=True, frozen=True):
    """Requests of the last 10 s by tenant (scope `t`), key (`k`) or class (`c`), and how many are here now, whenever
    they came: what shares of limits follow.
    """

    scope: str
    id: int
    requests: int
    tokens: int
    refused: int
    present: int = 0


class ItemRoom(Struct, array_like=True, frozen=True):
    """How many more items of a batch class the agent takes, beyond those it holds: what its batch slots can run in the
    next 60 s. `gpu_us` bounds the same by estimated work; -1: by number only.
    """

    class_id: int
    items: int
    gpu_us: int = -1


class ItemDone(Struct, array_like=True, frozen=True):
    """An attempt at an item ended. The usage records of `request_id` stand in the same report: they are charged only
    when this result is the first one accepted.

    `outcome` is a code of `core.reasons.Outcome`. `completed` with `status` 200 is the item's result; a `status` from
    400 to 499 other than 408, 409 and 429 is the engine's verdict on the request and is not tried again;
    `cancelled_by_drain` and `displaced` hand the item back unrun, which costs no attempt; all else is a failed attempt.
    `response` is the JSON document that the engine sent, unchanged, or null; `reason` says in words why it failed.
    `lease_id` is the lease that paid for the request: what it paid is given back when the charge is taken off the
    record. 0 for none, and from older agents.
    """

    job_id: int
    line: int
    attempt: int
    fence: int
    request_id: str
    outcome: int
    status: int
    response: Raw
    reason: str = ""
    lease_id: int = 0


class LostReports(Struct, array_like=True, frozen=True):
    """Reports from `first_seq` up to the one before this are lost for good; `records` in them, -1 where not known."""

    first_seq: int
    records: int


class Report(Struct, frozen=True):
    """One exchange. `revision` and `live_number` acknowledge; `refused_revision` with its reason refuses.

    `items_through` is the highest fence of an item that this epoch received, 0 for none: answers list the items after
    it in the order of their fences, so that a lost answer is made good by the next.
    """

    layout: int
    epoch: int
    seq: int
    sent_us: int
    revision: int
    live_number: int
    records: list[UsageRow] = []
    slot_usage: list[SlotUsage] = []
    slot_meters: list[SlotMeter] = []
    objectives: list[ObjectiveCount] = []
    refusals: list[RefusalCount] = []
    samples: list[DecisionSample] = []
    spends: list[LeaseSpend] = []
    trips: list[Trip] = []
    demand: list[Demand] = []
    figures: LiveFigures | None = None
    refused_revision: int | None = None
    refused_reason: str = ""
    seal: bool = False
    item_room: list[ItemRoom] = []
    items_through: int = 0
    items_done: list[ItemDone] = []
    clock: ClockReading | None = None
    lost: LostReports | None = None


class Grant(Struct, frozen=True):
    """`action` is lend or recall. A TTL counts from the instant the agent sent the report that this answers."""

    slot_id: int
    fence: int
    action: str
    ttl_us: int
    reason: str = ""


class Lease(Struct, frozen=True):
    """An open lease in full; `expires_us` ends its use, not its accounting.

    `outage`: a slice leased in advance, for a tenant whose outage posture is open; it is spent only while neither the
    control plane answers nor another lease is there. An agent that does not know the field spends it like any lease.
    `job` is the UUID of the job whose requests alone it pays for: it is a part of what that job has reserved.
    """

    lease_id: int
    tenant_id: int
    amount_nanos: int
    expires_us: int
    outage: bool = False
    job: str = ""


class Exhausted(Struct, frozen=True):
    """Why a tenant has no lease: the level and window that blocked, and when that window ends."""

    tenant_id: int
    budget: str
    ends_us: int


SHARES_HEADER = "x-flexband-shares"
"""With a report: the `shares_mark` of the answer whose shares its agent goes by when it is sent."""


class Share(Struct, frozen=True):
    """This agent's part of an installation-wide limit; null is no limit. scope: tenant, key or class."""

    scope: str
    id: int
    concurrency: int | None
    requests_per_s: float | None
    tokens_per_minute: int | None


class LiveItem(Struct, frozen=True):
    """A signed entry of the live list: `body` is the base64 of canonical JSON of `wire.live_list`."""

    number: int
    body: str
    kid: str
    signature: str


class LiveDelta(Struct, frozen=True):
    """Entries after `since` up to `through`; `full` replaces whatever the agent had."""

    since: int
    through: int
    full: bool
    entries: list[LiveItem]


class ItemJob(Struct, frozen=True):
    """What all items of a job have in common; an answer has one for each job that its `items` name.

    `uuid` is what usage records carry as their job; `key_id` is 0 where no API key submitted it; `endpoint` is the path
    that the bodies are for, such as /v1/chat/completions; `deadline_us` null is best effort: ordered last.
    """

    job_id: int
    uuid: str
    tenant_id: int
    key_id: int
    class_id: int
    model: str
    endpoint: str
    deadline_us: int | None
    expected_output_tokens: int


class Item(Struct, array_like=True, frozen=True):
    """An item leased to this epoch. `fence` names the lease and grows from one item to the next; `lease_us` counts from
    the instant the agent sent the report that this answers: what is not done by then is left to others.

    `body` is the JSON document that was submitted, unchanged; `prompt_tokens` the estimate for it.
    """

    job_id: int
    line: int
    attempt: int
    fence: int
    lease_us: int
    prompt_tokens: int
    body: Raw


class ItemsCancelled(Struct, array_like=True, frozen=True):
    """Items to drop, waiting or running: those of these fences, or all of the job where `fences` is empty."""

    job_id: int
    fences: list[int] = []


class Answer(Struct, frozen=True):
    """What a report is answered with: through which seq of its epoch reports are stored, and all that is in force.

    `revision` and `digest` name the policy to pull (0 and empty: none); `generation` is the
    installation's and only grows; `quarantined` counts rows of this report that were set aside. `signing_keys` is
    `signing.keys_digest` of the keys in use: an agent that trusts others says hello for them. `shares_mark` names the
    shares that are due: with a report that names the same ones in SHARES_HEADER they are left out, and stay in force.
    """

    accepted_through: int
    repeat: bool
    revision: int
    digest: str
    interval_ms: int
    server_time_us: int
    generation: int
    grants: list[Grant] = []
    leases: list[Lease] = []
    exhausted: list[Exhausted] = []
    shares: list[Share] = []
    live: LiveDelta | None = None
    quarantined: int = 0
    rotate_key: bool = False
    drain: bool = False
    item_jobs: list[ItemJob] = []
    items: list[Item] = []
    items_cancelled: list[ItemsCancelled] = []
    items_give_back: int = 0
    signing_keys: str = ""
    shares_mark: str = ""
