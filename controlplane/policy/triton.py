"""A pool's policy as blocks of Triton's config.pbtxt: how many instances, what they share, how requests are batched.

Protobuf text format of `ModelConfig` (triton-inference-server/common, protobuf/model_config.proto). What a model is
made of (platform, tensors) is its owner's part of the file; these blocks are put beside it. Pure: a compiled document
goes in, text comes out.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from controlplane.core.engine_priority import priority_levels
from controlplane.fleet.models import Slot
from controlplane.wire.policy import ClassPolicy, PolicyDocument, SlotPolicy

REJECT, DELAY = "REJECT", "DELAY"
BANDS = (Slot.Band.INTERACTIVE, Slot.Band.FLEX, Slot.Band.BATCH)


def config_blocks(document: PolicyDocument, *, revision: int, agent_id: int | None = None) -> str:
    """The blocks for one server: that of an agent, or one that runs the whole pool where none is named.

    Raises ValueError when there is no slot to run anything on.
    """
    pool = document.pool
    slots = [slot for slot in pool.slots if agent_id is None or slot.agent_id == agent_id]
    if not slots:
        raise ValueError(f"pool {pool.slug} has no slots" + ("" if agent_id is None else " on that agent"))
    lines = [
        *_head(document, slots, revision=revision, agent_id=agent_id),
        f"max_batch_size: {pool.batching.max_batch_size}",
        "",
        *_instances(document, slots),
        "",
        *_batching(document),
    ]
    return "\n".join(lines) + "\n"


def _head(document: PolicyDocument, slots: Sequence[SlotPolicy], *, revision: int, agent_id: int | None) -> list[str]:
    pool = document.pool
    levels = priority_levels(row.priority for row in document.classes)
    where = "the whole pool on one server" if agent_id is None else f"agent {agent_id}"
    told = ", ".join(
        f"{levels[row.priority]} = {row.slug}" for row in sorted(document.classes, key=lambda row: row.priority)
    )
    return [
        f"# Model {_comment(pool.model)}, pool {pool.slug}, revision {revision}: {where}.",
        "# Put these blocks into the model's config.pbtxt beside its platform, inputs and outputs.",
        "# A model whose tensors have no batch dimension keeps max_batch_size 0 and no dynamic_batching.",
        "# Start the server with --rate-limit=execution_count"
        f" --rate-limit-resource={_resource(document)}:{len(slots)}",
        "# or one instance at a time will run: without a number Triton takes what the largest instance needs.",
        "# Triton starts `count` instances on each GPU that a group may use: list them with `gpus` so that it is"
        f" {len(slots)} in all.",
        "# Priority: level 1 is the highest, a larger level is served later, 0 asks for the default."
        f" Levels here: {told}.",
    ]


def _instances(document: PolicyDocument, slots: Sequence[SlotPolicy]) -> Iterator[str]:
    """One group per band; which request may run on which band stays the agent's decision."""
    pool = document.pool
    levels = {row.slug: level for row, level in _levels(document.classes)}
    last = max(levels.values(), default=1)
    count = Counter(slot.band for slot in slots)
    weight = {
        Slot.Band.INTERACTIVE: levels.get(pool.interactive_class, 1),
        Slot.Band.FLEX: levels.get(pool.interactive_class, 1),
        Slot.Band.BATCH: levels.get(pool.batch_class, last),
    }
    groups = [band for band in BANDS if count[band]]
    yield "instance_group ["
    for band in groups:
        yield "  {"
        yield f"    name: {quoted(f'{pool.slug}-{band.value}')}"
        yield f"    count: {count[band]}"
        yield "    kind: KIND_GPU"
        yield "    rate_limiter {"
        yield "      resources ["
        yield "        {"
        yield f"          name: {quoted(_resource(document))}"
        yield "          global: true"
        yield "          count: 1"
        yield "        }"
        yield "      ]"
        yield f"      priority: {weight[band]}"
        yield "    }"
        yield "  }" + ("" if band is groups[-1] else ",")
    yield "]"


def _batching(document: PolicyDocument) -> Iterator[str]:
    batching = document.pool.batching
    yield "dynamic_batching {"
    if batching.max_batch_size > 1:
        yield f"  preferred_batch_size: [ {batching.max_batch_size} ]"
    yield f"  max_queue_delay_microseconds: {batching.max_wait_ms * 1000}"
    by_level: dict[int, list[ClassPolicy]] = {}
    for row, level in _levels(document.classes):
        by_level.setdefault(level, []).append(row)
    if by_level:
        yield f"  priority_levels: {len(by_level)}"
        yield f"  default_priority_level: {len(by_level)}"
        yield "  default_queue_policy {"
        yield from _queue_policy(by_level[len(by_level)], "    ")
        yield "  }"
    for level, rows in sorted(by_level.items()):
        yield "  priority_queue_policy {"
        yield f"    key: {level}"
        yield "    value {"
        yield from _queue_policy(rows, "      ")
        yield "    }"
        yield "  }"
    yield "}"


def _queue_policy(rows: Sequence[ClassPolicy], indent: str) -> Iterator[str]:
    """The widest limits of the classes of one level: the agent has refused before what one of them does not take.

    A queue of none is written as one request, because to Triton 0 is no limit.
    """
    rejects = all(row.overload != "queue" for row in rows)
    yield f"{indent}timeout_action: {REJECT if rejects else DELAY}"
    yield f"{indent}default_timeout_microseconds: {max(row.max_wait_ms for row in rows) * 1000}"
    yield f"{indent}allow_timeout_override: false"
    yield f"{indent}max_queue_size: {max([1, *(row.max_queue for row in rows)])}"


def _levels(classes: Sequence[ClassPolicy]) -> list[tuple[ClassPolicy, int]]:
    levels = priority_levels(row.priority for row in classes)
    return [(row, levels[row.priority]) for row in sorted(classes, key=lambda row: (row.priority, row.slug))]


def _resource(document: PolicyDocument) -> str:
    return f"flexband-{document.pool.slug}"


def quoted(text: str) -> str:
    """A string literal of the protobuf text format; everything but printable ASCII is escaped byte by byte."""
    parts = []
    for byte in text.encode():
        char = chr(byte)
        if char in "\\\"'":
            parts.append("\\" + char)
        elif " " <= char <= "~":
            parts.append(char)
        else:
            parts.append(f"\\{byte:03o}")
    return '"' + "".join(parts) + '"'


def _comment(text: str) -> str:
    """Text that stays within its comment."""
    return "".join(char if char.isprintable() else " " for char in text)
