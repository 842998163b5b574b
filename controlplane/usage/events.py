"""Events of other gateways in the CloudEvents form: one request each, known by source and id, counted once."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from controlplane.core.period import to_us
from controlplane.lab.traces import TraceRequest, request_of
from controlplane.tenants.models import Tenant
from controlplane.usage.imports import ImportRow, Result, store

EVENTS_MOST = 1_000
ID_CHARS_MOST = 200
SOURCE_CHARS_MOST = 120
AHEAD_MOST = timedelta(minutes=5)
COUNTS = ("prompt_tokens", "output_tokens", "cached_tokens", "model")


class EventResult(StrEnum):
    """What became of an event; `conflict`: its identity is known with other content, which stays."""

    STORED = "stored"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class EventOutcome:
    """Answer for one event of a batch; `index` counts from 0."""

    index: int
    id: str
    result: EventResult
    reason: str = ""


def take_events(events: Sequence[object], *, now: datetime) -> list[EventOutcome]:
    """Keeps the usable events of a batch and answers for each, in their order."""
    tenants = frozenset(Tenant.objects.filter(slug__in=_slugs(events)).values_list("slug", flat=True))
    outcomes: dict[int, EventOutcome] = {}
    by_source: dict[str, list[ImportRow]] = defaultdict(list)
    for index, event in enumerate(events):
        try:
            source, row = event_row(event, tenants, index=index, now=now)
        except ValueError as error:
            outcomes[index] = EventOutcome(index, _id_of(event), EventResult.REFUSED, str(error))
        else:
            by_source[source].append(row)
    for source, rows in sorted(by_source.items()):
        for row, result in zip(rows, store(rows, source=source, now=now), strict=True):
            reason = "Known with other content; the first is kept." if result is Result.CONFLICT else ""
            outcomes[row.line] = EventOutcome(row.line, row.external_id, EventResult(result.value), reason)
    return [outcomes[index] for index in range(len(events))]


def event_row(event: object, tenants: frozenset[str], *, index: int, now: datetime) -> tuple[str, ImportRow]:
    """An event's source and the row to keep. Raises ValueError with what is wrong and what is wanted."""
    if not isinstance(event, dict):
        raise ValueError("An event is a JSON object.")
    if event.get("specversion") != "1.0":
        raise ValueError('The "specversion" has to be "1.0".')
    name, source = _text(event, "id", ID_CHARS_MOST), _text(event, "source", SOURCE_CHARS_MOST)
    _text(event, "type", ID_CHARS_MOST)
    tenant = _text(event, "subject", ID_CHARS_MOST)
    if tenant not in tenants:
        raise ValueError(f"There is no tenant {tenant!r}: the subject is a tenant's short name.")
    request = _request(event, tenant, name)
    if request.at_us > to_us(now + AHEAD_MOST):
        raise ValueError("Its time is in the future: check the gateway's clock.")
    return source, ImportRow(name, request, index)


def _request(event: dict[str, Any], tenant: str, name: str) -> TraceRequest:
    data = event.get("data")
    if not isinstance(data, dict):
        raise ValueError('"data" has to be an object with prompt_tokens and output_tokens.')
    unknown = sorted(set(map(str, data)) - set(COUNTS))
    if unknown:
        raise ValueError(f'"data" has unknown fields: {", ".join(unknown)[:200]}.')
    if any(isinstance(data.get(count, 0), (bool, float, str)) for count in COUNTS[:3]):
        raise ValueError("Token counts are whole numbers.")
    try:
        return request_of({**data, "at": event.get("time"), "tenant": tenant, "id": name})
    except KeyError as error:
        raise ValueError(f'"data" lacks {error.args[0]}.') from None
    except TypeError:
        raise ValueError("Token counts are whole numbers.") from None


def _text(event: dict[str, Any], field: str, most: int) -> str:
    value = event.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= most or not value.isprintable():
        raise ValueError(f'"{field}" has to be text of 1 to {most} printable characters.')
    return value


def _id_of(event: object) -> str:
    value = event.get("id") if isinstance(event, dict) else None
    return value[:ID_CHARS_MOST] if isinstance(value, str) else ""


def _slugs(events: Sequence[object]) -> set[str]:
    subjects = (event.get("subject") for event in events if isinstance(event, dict))
    return {subject for subject in subjects if isinstance(subject, str) and subject.isprintable()}
