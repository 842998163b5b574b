"""The last word to a client, once the record of its request is written."""

from __future__ import annotations

from controlplane.agent.answers import error_event, refusal_answer
from controlplane.agent.backends.request import Failure
from controlplane.agent.call import Call
from controlplane.agent.call_headers import call_headers
from controlplane.core.reasons import Outcome, answer_for


def answer_client(call: Call, outcome: Outcome, body: bytes, failure: Failure | None) -> None:
    """Tell the client, after the record was written."""
    exchange = call.exchange
    exchange.call = None
    if outcome is Outcome.CANCELLED_BY_CLIENT:
        return
    if call.head_sent:
        told = failure is not None and failure.told
        rest = body if failure is None else failure.body
        last = rest if told or outcome is Outcome.COMPLETED else error_event(outcome)
        exchange.end_stream(last, close=outcome is not Outcome.COMPLETED)
    elif outcome is Outcome.COMPLETED:
        if call.stream:
            exchange.begin_stream(call_headers(call), b"")
            exchange.end_stream(body)
        else:
            exchange.respond(200, body, call_headers(call))
    elif failure is not None and 400 <= failure.status < 500 and failure.body:
        exchange.respond(failure.status, failure.body, call_headers(call) + _retry_after(failure), failure.content_type)
    else:
        refusal = refusal_answer(outcome, None, "" if failure is None else failure.detail)
        headers = call_headers(call) + refusal.headers
        if failure is not None and b"retry-after:" not in headers:
            headers += _retry_after(failure)
        exchange.respond(refusal.status, refusal.body, headers)


def _retry_after(failure: Failure) -> bytes:
    """The upstream's own word on when to come again."""
    return b"retry-after: %b\r\n" % failure.retry_after if failure.retry_after else b""


def status_of(outcome: Outcome, failure: Failure | None) -> int:
    """The status that a record has: the upstream's own where it blamed the client, else that of the outcome."""
    if failure is not None and 400 <= failure.status < 500:
        return failure.status
    return answer_for(outcome).status
