"""Ends of batch items as reports carry them: each with the usage record of the request that it was run by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Raw

from controlplane.agent.journal_entries import Closed, ItemEnd
from controlplane.agent.spool import RESPONSES_BYTES
from controlplane.core.reasons import Outcome
from controlplane.wire.report import ItemDone, Report, UsageRow

NO_RESPONSE = b"null"
TOO_LARGE = 413


def items_done(entries: Iterable[Closed]) -> list[ItemDone]:
    """The ends that go with these records."""
    return [item_done(entry.row, entry.item, entry.lease_id) for entry in entries if entry.item is not None]


def item_done(row: UsageRow, end: ItemEnd, lease_id: int) -> ItemDone:
    """One end: the request's record says how, the item's entry of what."""
    return ItemDone(
        end.job_id,
        end.line,
        end.attempt,
        end.fence,
        row.request_id,
        row.outcome,
        row.status,
        Raw(end.response),
        end.reason,
        lease_id,
    )


def carried(closed: Iterable[Closed], records_max: int) -> list[Closed]:
    """The oldest records for one report: so many, with no more responses than it should carry, but one at least."""
    entries: list[Closed] = []
    responses_bytes = 0
    for entry in closed:
        responses_bytes += 0 if entry.item is None else len(entry.item.response)
        if entries and (len(entries) >= records_max or responses_bytes > RESPONSES_BYTES):
            break
        entries.append(entry)
    return entries


def closed_again(rows: Sequence[UsageRow], ends: Iterable[ItemDone]) -> list[Closed]:
    """Journal entries of records that a report had carried, each with its item's end, for a later report."""
    by_request = {end.request_id: end for end in ends}
    return [_closed(row, by_request.get(row.request_id)) for row in rows]


def _closed(row: UsageRow, end: ItemDone | None) -> Closed:
    """The report that had carried it goes on telling what was spent."""
    if end is None:
        return Closed(row, [], counted=True)
    item = ItemEnd(end.job_id, end.line, end.attempt, end.fence, bytes(end.response), end.reason)
    return Closed(row, [], counted=True, item=item, lease_id=end.lease_id)


def without_response(report: Report) -> Report | None:
    """The report of one record whose response the control plane does not take: its item failed, and says so.

    None where no response is in it.
    """
    if not any(len(end.response) > len(NO_RESPONSE) for end in report.items_done):
        return None
    ends = [
        msgspec.structs.replace(
            end,
            outcome=Outcome.UPSTREAM_ERROR.code,
            status=TOO_LARGE,
            response=Raw(NO_RESPONSE),
            reason=f"The control plane takes no report with a response of {len(end.response)} bytes.",
        )
        if len(end.response) > len(NO_RESPONSE)
        else end
        for end in report.items_done
    ]
    return msgspec.structs.replace(report, items_done=ends)
