"""What an admission check is called on a page, and its value and limit as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from controlplane.core.money import format_nanos

LABELS: Final[dict[str, str]] = {
    "key": "Key active",
    "tenant": "Tenant active",
    "class": "Class open to key and tenant",
    "model": "Model open to key, tenant and class",
    "prompt_tokens": "Prompt, tokens",
    "output_tokens": "Output at most, tokens",
    "budget_nanos": "Charge at most, against what is left of the lease",
    "tenant_concurrency": "Tenant’s requests running and queued here",
    "key_concurrency": "Key’s requests running and queued here",
    "class_rate": "Class safe rate: in the bucket, needed",
    "tenant_request_rate": "Tenant’s request rate: in the bucket, needed",
    "tenant_token_rate": "Tenant’s tokens per minute: in the bucket, needed",
    "key_request_rate": "Key’s request rate: in the bucket, needed",
    "key_token_rate": "Key’s tokens per minute: in the bucket, needed",
    "fits_kv_tokens": "Prompt and output in the largest slot, KV tokens",
    "queue_depth": "Queue depth",
    "queue_wait_ms": "Estimated wait, ms",
    "memory_kv_tokens": "KV memory now, tokens: what does not fit waits",
}
"""By the names of `core.admission.CHECK_REASONS`."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One admission check in the order it was made; `first` marks the first that did not pass. `held` None: unknown."""

    number: int
    name: str
    value: str
    limit: str
    held: bool | None
    first: bool


def check_rows(checks: Iterable[tuple[str, str, str, bool | None]]) -> list[CheckRow]:
    """Rows of an explanation: (name, value, limit, held) as agents write them."""
    rows, failed = [], False
    for number, (name, value, limit, held) in enumerate(checks, start=1):
        first = held is False and not failed
        rows.append(CheckRow(number, label(name), readable(name, value), readable(name, limit), held, first))
        failed = failed or held is False
    return rows


def label(name: str) -> str:
    """The name of a check; one that a newer agent makes is shown as it came."""
    return LABELS.get(name, name.replace("_", " "))


def readable(name: str, text: str) -> str:
    """A value or limit: money in units of the currency, all else as the agent said it."""
    if name.endswith("_nanos") and text.lstrip("-").isdigit():
        return format_nanos(int(text))
    return text
