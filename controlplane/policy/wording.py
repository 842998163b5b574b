"""How each field of a policy document is told to an operator: sentences for more and less, values with their units."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controlplane.wire.policy import ClassPolicy, ContractPolicy, RatePolicy, SlotPolicy, TenantPolicy

NANOS = 1_000_000_000
NONE = "none"

Format = Callable[[Any], str]


@dataclass(frozen=True)
class Field:
    """How a field is told: sentences for more, less and otherwise changed, and its unit."""

    path: str
    text: Format
    changed: str
    more: str = ""
    less: str = ""

    def sentence(self, before: Any, after: Any) -> str:
        if self.more and isinstance(before, (int, float)) and isinstance(after, (int, float)):
            return self.more if after > before else self.less
        return self.changed


def _plain(value: Any) -> str:
    return NONE if value is None or value == "" else str(value)


def _unit(unit: str) -> Format:
    single = unit[:-1] if len(unit) > 2 and unit.endswith("s") else unit
    return lambda value: NONE if value is None else f"{value:,} {single if value == 1 else unit}"


def _ratio(value: Any) -> str:
    return f"{value:.2f}"


def _share(value: int) -> str:
    return f"{value / 10_000:g} %"


def _listed(value: list[Any]) -> str:
    return ", ".join(str(item) for item in value) if value else NONE


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _all_or(value: int | None) -> str:
    return "all flex slots" if value is None else _unit("slots")(value)


def _table(entries: dict[str, float]) -> str:
    ordered = sorted(entries.items(), key=lambda item: int(item[0]))
    return ", ".join(f"{slots}: {rate:g}/s" for slots, rate in ordered) or NONE


def _agent(value: int | None) -> str:
    return "no agent" if value is None else f"agent {value}"


def _money(nanos: int) -> str:
    whole, rest = divmod(nanos, NANOS)
    digits = f"{rest:09d}".rstrip("0").ljust(2, "0")
    return f"{whole:,}.{digits}"


def tenant_text(row: TenantPolicy) -> str:
    return f"weight {row.weight}, {_listed(row.classes)}"


def class_text(row: ClassPolicy) -> str:
    return f"{row.kind}, wait at most {row.max_wait_ms:,} ms"


def slot_text(row: SlotPolicy) -> str:
    return f"{row.band}, {row.places} places"


def contract_text(row: ContractPolicy) -> str:
    return f"{row.metric} {row.threshold_ms:,} ms" if row.objective == "latency" else "deadline"


def rate_text(row: RatePolicy) -> str:
    return (
        f"prompt {_money(row.prompt_nanos_per_mtok)}, cached {_money(row.cached_nanos_per_mtok)}, "
        f"output {_money(row.output_nanos_per_mtok)} per million tokens"
    )


def slot_fields(name: str) -> tuple[Field, ...]:
    return (
        Field("band", _plain, f"Slot {name} moves to another band."),
        Field("places", _unit("places"), "", f"Slot {name} runs more at once.", f"Slot {name} runs less at once."),
        Field("kv_tokens", _unit("tokens"), "", f"Slot {name} has more KV memory.", f"Slot {name} has less KV memory."),
        Field("agent_id", _agent, f"Slot {name} runs on another agent."),
        Field("name", _plain, "A slot has another name."),
    )


POOL_FIELDS = (
    Field("model", _plain, "It serves another model."),
    Field("isolation", _plain, "Its isolation design is another."),
    Field("interactive_class", _plain, "Its interactive class is another."),
    Field("batch_class", _plain, "Its batch class is another."),
    Field("fairness_unit", _plain, "Fair shares are counted in another unit."),
    Field("prompt_weight", _plain, "", "Prompt tokens weigh more.", "Prompt tokens weigh less."),
    Field("output_weight", _plain, "", "Output tokens weigh more.", "Output tokens weigh less."),
    Field("sizes.gpu_ms", _listed, "Size classes have other bounds (ms of GPU time)."),
    Field(
        "sizes.aging_s", _unit("s"), "", "A request waits longer before it goes first.", "A request goes first sooner."
    ),
    Field(
        "sizes.reserve_after_ms",
        _unit("ms"),
        "",
        "A large request waits longer before memory is kept for it.",
        "Memory is kept for a large request sooner.",
    ),
    Field("prefill_us_per_token", _unit("µs"), "Prefill is estimated at another cost per token."),
    Field("decode_us_per_token", _unit("µs"), "Decode is estimated at another cost per token."),
    Field(
        "batching.max_batch_size",
        _unit("inputs"),
        "",
        "More embeddings may run together.",
        "Fewer embeddings may run together.",
    ),
    Field(
        "batching.max_wait_ms",
        _unit("ms"),
        "",
        "A batch may wait longer for others.",
        "A batch runs sooner with what it has.",
    ),
    Field(
        "flex.lend_p95_ms",
        _unit("ms"),
        "",
        "Interactive requests may queue longer before slots are called home.",
        "Slots are called home at a shorter interactive queue.",
    ),
    Field(
        "flex.lend_hold_s",
        _unit("s"),
        "",
        "Interactive work must be calm for longer before a slot is lent.",
        "A slot is lent after a shorter calm.",
    ),
    Field("flex.load_limit", _ratio, "", "Slots are lent at a higher load.", "Slots are lent at a lower load only."),
    Field(
        "flex.lend_slack", _ratio, "", "Batch gets a slot with more slack left.", "Batch must be later to get a slot."
    ),
    Field(
        "flex.return_slack",
        _ratio,
        "",
        "Batch gives a slot back later, with more slack.",
        "Batch gives a slot back sooner.",
    ),
    Field(
        "flex.return_hold_s",
        _unit("s"),
        "",
        "Slack must last longer before a slot comes back.",
        "A slot comes back after a shorter time of slack.",
    ),
    Field(
        "flex.min_hold_s", _unit("s"), "", "Batch keeps a lent slot for longer.", "Batch may give a slot back sooner."
    ),
    Field(
        "flex.drain_bound_s",
        _unit("s"),
        "",
        "A slot may take longer to come home.",
        "Slots come back to interactive work within a shorter drain.",
    ),
    Field(
        "flex.grant_ttl_s", _unit("s"), "", "A grant outlives silence for longer.", "A grant ends sooner in silence."
    ),
    Field(
        "flex.cooldown_s",
        _unit("s"),
        "",
        "Lending pauses longer after a recall.",
        "Lending goes on sooner after a recall.",
    ),
    Field(
        "flex.decision_interval_s",
        _unit("s"),
        "",
        "Slots are lent one after another more slowly.",
        "Slots are lent faster.",
    ),
    Field(
        "flex.max_lent",
        _all_or,
        "Another number of slots may be lent at once.",
        "More slots may be lent at once.",
        "Fewer slots may be lent at once.",
    ),
    Field(
        "flex.spillover_per_week",
        _unit("lends"),
        "",
        "More lends a week are expected.",
        "Fewer lends a week are expected.",
    ),
    Field("flex.spillover_action", _plain, "Lends over the weekly budget are treated differently."),
    Field("safe_rate.entries", _table, "The tested safe rate is another."),
    Field("safe_rate.measured_at", _plain, "The safe rate was tested at another time."),
    Field("safe_rate.valid_until", _plain, "The safe rate is valid until another time."),
)

TENANT_FIELDS = (
    Field(
        "weight",
        _plain,
        "",
        "It gets a larger share when tenants compete.",
        "It gets a smaller share when tenants compete.",
    ),
    Field(
        "max_concurrency",
        _unit("requests"),
        "",
        "More of its requests may be in at once.",
        "Fewer of its requests may be in at once.",
    ),
    Field("classes", _listed, "It may use other classes."),
    Field("models", _listed, "It may use other models."),
    Field("outage_posture", _plain, "Requests without a lease are treated differently in an outage."),
    Field("hard_budget", _yes, "Whether a hard budget stops it is another."),
    Field("ancestors", _listed, "It hangs under another tenant (ids)."),
)

CLASS_FIELDS = (
    Field("kind", _plain, "It is of another kind."),
    Field("priority", _plain, "Its priority is another."),
    Field("min_share_ppm", _share, "", "It is promised a larger share.", "It is promised a smaller share."),
    Field("max_prompt_tokens", _unit("tokens"), "", "Longer prompts are accepted.", "Long prompts are refused sooner."),
    Field("max_output_tokens", _unit("tokens"), "", "Longer outputs are accepted.", "Outputs are cut to fewer tokens."),
    Field("default_output_tokens", _unit("tokens"), "Without a limit another output length is assumed."),
    Field("template_allowance_tokens", _unit("tokens"), "The budget's bound adds another template allowance."),
    Field("max_queue", _unit("requests"), "", "More requests may wait.", "Fewer requests may wait."),
    Field(
        "max_wait_ms",
        _unit("ms"),
        "",
        "A request may wait longer before it is refused.",
        "A request that would wait longer than this is refused.",
    ),
    Field("stage_timeout_s", _unit("s"), "", "A stage may take longer.", "A stage is cut off sooner."),
    Field("overload", _plain, "Under overload it does something else."),
    Field("downgrade_to", _plain, "It downgrades to another class."),
    Field("retry_safe", _yes, "Whether its requests may be run twice is another."),
    Field("cancellable", _yes, "Whether its requests may be cancelled is another."),
    Field(
        "default_deadline_s",
        _unit("s"),
        "",
        "Jobs without a deadline have longer.",
        "Jobs without a deadline have less time.",
    ),
    Field("models", _listed, "It allows other models."),
)
