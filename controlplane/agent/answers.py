"""What clients are told: OpenAI's error shape, the status of each reason, and the headers of every answer."""

from __future__ import annotations

import msgspec

from controlplane.core.reasons import Outcome, Reason, answer_for

_encode = msgspec.json.Encoder().encode

SENTENCES: dict[Reason | Outcome, str] = {
    Reason.KEY_UNKNOWN: "The API key is not known here. Check the Authorization header; new keys need up to 2 s.",
    Reason.KEY_REVOKED: "This API key was revoked. Use another key of your organisation.",
    Reason.KEY_EXPIRED: "This API key has expired. Ask your administrator for a new one.",
    Reason.TENANT_SUSPENDED: "Your organisation is suspended here. Contact the operator.",
    Reason.CLASS_NOT_ALLOWED: "The class is not open to this key. Leave out x-flexband-class or name one that is.",
    Reason.MODEL_NOT_ALLOWED: "The model is not served here for this key. GET /v1/models lists what is.",
    Reason.PROMPT_TOO_LONG: "The prompt is longer than the class allows. Shorten it.",
    Reason.OUTPUT_TOO_LONG: "The asked output is longer than the class allows. Lower max_tokens.",
    Reason.BUDGET_EXHAUSTED: "The budget is used up. Retry-After tells when its period ends.",
    Reason.NO_LEASE: "The budget could not be checked just now. Retry shortly.",
    Reason.CONCURRENCY_LIMIT: "Too many requests are running or waiting at once. Retry when one has ended.",
    Reason.RATE_LIMIT: "Too many requests in a short time. Retry after the time in Retry-After.",
    Reason.NEVER_FITS: "Prompt and max_tokens together exceed the memory of the largest slot. Shorten one of them.",
    Reason.QUEUE_FULL: "The queue is full. Retry after the time in Retry-After.",
    Reason.WAIT_TOO_LONG: "The expected wait is longer than the class allows. Retry after the time in Retry-After.",
    Outcome.CANCELLED_BY_DRAIN: "The server is shutting down. Retry: another one will take the request.",
    Outcome.DISPLACED: "The request gave way to one of higher precedence. Retry after the time in Retry-After.",
    Outcome.QUEUE_TIMEOUT: "The request waited too long in the queue. Retry once, then send less at a time.",
    Outcome.STAGE_TIMEOUT: "The request took longer than the class allows. Shorten the prompt or lower max_tokens.",
    Outcome.UPSTREAM_ERROR: "The inference server failed. Retry; if it goes on, tell the operator the x-request-id.",
    Outcome.LOST: "The request was lost when its server ended. Retry: another one will take it.",
}


def error_body(message: str, kind: str, code: str | None, param: str | None = None) -> bytes:
    """The OpenAI error shape."""
    return _encode({"error": {"message": message, "type": kind, "code": code, "param": param}})


def error_event(why: Outcome) -> bytes:
    """An error inside a stream that has begun."""
    answer = answer_for(why)
    return b"data: " + error_body(SENTENCES[why], answer.error_type or "server_error", answer.error_code) + b"\n\n"


class Refusal(msgspec.Struct, frozen=True):
    """Status, body and retry headers of a refusal or of an end without an answer."""

    status: int
    body: bytes
    headers: bytes


def refusal_answer(why: Reason | Outcome, retry_after_s: int | None, detail: str = "") -> Refusal:
    """What the client gets; `detail` is added to the sentence."""
    answer = answer_for(why)
    message = f"{SENTENCES[why]} {detail}" if detail else SENTENCES[why]
    headers = b""
    if retry_after_s is None and answer.retry_after.name == "ONE_SECOND":
        retry_after_s = 1
    if retry_after_s is not None:
        headers += b"retry-after: %d\r\n" % retry_after_s
    if answer.should_retry is not None:
        headers += b"x-should-retry: true\r\n" if answer.should_retry else b"x-should-retry: false\r\n"
    return Refusal(
        answer.status,
        error_body(message, answer.error_type or "server_error", answer.error_code, answer.param),
        headers,
    )


def bad_request(message: str, param: str | None = None) -> bytes:
    """Body of a 400 for a request that cannot be understood."""
    return error_body(message, "invalid_request_error", None, param)


def header_text(value: str) -> bytes:
    """A header value that cannot break out of its line: what is not printable ASCII is left out."""
    if value.isascii() and value.isprintable():
        return value.encode("ascii")
    return "".join(char for char in value if " " <= char <= "~").encode("ascii")
