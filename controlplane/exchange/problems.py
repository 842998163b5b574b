"""Refusals of the agents' door as problem documents (RFC 9457) with the closed codes of `wire.problem.Problem`."""

import msgspec
from msgspec import Struct

from controlplane.wire.problem import Problem

_TITLES = {
    "superseded": (409, "A newer process of this agent has taken over"),
    "unknown_epoch": (409, "This epoch was never issued here"),
    "conflict": (409, "This was already taken with other content"),
    "expected": (409, "Reports come in order without a gap"),
    "unknown_agent": (401, "This agent is not known here"),
    "bad_signature": (401, "The signature does not match"),
    "sealed": (409, "This epoch is closed"),
    "too_large": (413, "The body is too large"),
    "unreadable": (400, "The body cannot be read"),
    "token_used": (409, "This enrolment token was used by another agent"),
    "token_expired": (410, "This enrolment token has expired"),
    "token_unknown": (404, "There is no such enrolment token"),
    "must_upgrade": (426, "This agent's software is too old or too new"),
    "retired": (410, "This agent was retired"),
    "not_served": (403, "This agent's pool does not serve this tenant"),
    "busy": (503, "The report could not be stored now"),
    "not_found": (404, "There is nothing at this address"),
}


def problem(code: str, detail: str, *, expected: int | None = None, status: int | None = None) -> Problem:
    """A problem document by its code."""
    usual, title = _TITLES[code]
    return Problem(
        type=f"urn:flexband:problem:{code}",
        title=title,
        status=status or usual,
        code=code,
        detail=detail,
        expected=expected,
    )


class Refusal(Exception):
    """Ends the handling of a request with a problem document."""

    def __init__(self, code: str, detail: str, *, expected: int | None = None, status: int | None = None) -> None:
        super().__init__(detail)
        self.problem = problem(code, detail, expected=expected, status=status)


def fault() -> Refusal:
    """For what must not happen; the log says more."""
    return Refusal("busy", "The control plane met a fault, which is in its log.", status=500)


class Reply(Struct, frozen=True):
    """What is sent back: status, body and headers."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/json"),)


def problem_reply(document: Problem) -> Reply:
    headers: tuple[tuple[bytes, bytes], ...] = ((b"content-type", b"application/problem+json"),)
    if document.status in (429, 503):
        headers += ((b"retry-after", b"1"),)
    return Reply(document.status, msgspec.json.encode(document), headers)
