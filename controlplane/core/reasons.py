"""Why a request was refused, how an admitted one ended, and what its client is told.

One table holds all of it. The integer codes are stable: they travel on the wire and stand in the database, so a
code is never given to another meaning. Codes of outcomes and of reasons do not overlap, so one column can hold either.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final


class Reason(StrEnum):
    """Refusals, in order of precedence: the first that holds is the one that is named."""

    KEY_UNKNOWN = "key_unknown"
    KEY_REVOKED = "key_revoked"
    KEY_EXPIRED = "key_expired"
    TENANT_SUSPENDED = "tenant_suspended"
    CLASS_NOT_ALLOWED = "class_not_allowed"
    MODEL_NOT_ALLOWED = "model_not_allowed"
    PROMPT_TOO_LONG = "prompt_too_long"
    OUTPUT_TOO_LONG = "output_too_long"
    BUDGET_EXHAUSTED = "budget_exhausted"
    NO_LEASE = "no_lease"
    CONCURRENCY_LIMIT = "concurrency_limit"
    RATE_LIMIT = "rate_limit"
    NEVER_FITS = "never_fits"
    QUEUE_FULL = "queue_full"
    WAIT_TOO_LONG = "wait_too_long"

    @property
    def code(self) -> int:
        """The stable integer of this reason (32 and up)."""
        return REASON_CODES[self]


class Outcome(StrEnum):
    """How an admitted request ended."""

    COMPLETED = "completed"
    CANCELLED_BY_CLIENT = "cancelled_by_client"
    CANCELLED_BY_DRAIN = "cancelled_by_drain"
    DISPLACED = "displaced"
    QUEUE_TIMEOUT = "queue_timeout"
    STAGE_TIMEOUT = "stage_timeout"
    UPSTREAM_ERROR = "upstream_error"
    LOST = "lost"

    @property
    def code(self) -> int:
        """The stable integer of this outcome (1 to 31)."""
        return OUTCOME_CODES[self]


OUTCOME_CODES: Final[dict[Outcome, int]] = {
    Outcome.COMPLETED: 1,
    Outcome.CANCELLED_BY_CLIENT: 2,
    Outcome.CANCELLED_BY_DRAIN: 3,
    Outcome.DISPLACED: 4,
    Outcome.QUEUE_TIMEOUT: 5,
    Outcome.STAGE_TIMEOUT: 6,
    Outcome.UPSTREAM_ERROR: 7,
    Outcome.LOST: 8,
}

REASON_CODES: Final[dict[Reason, int]] = {
    Reason.KEY_UNKNOWN: 32,
    Reason.KEY_REVOKED: 33,
    Reason.KEY_EXPIRED: 34,
    Reason.TENANT_SUSPENDED: 35,
    Reason.CLASS_NOT_ALLOWED: 36,
    Reason.MODEL_NOT_ALLOWED: 37,
    Reason.PROMPT_TOO_LONG: 38,
    Reason.OUTPUT_TOO_LONG: 39,
    Reason.BUDGET_EXHAUSTED: 40,
    Reason.NO_LEASE: 41,
    Reason.CONCURRENCY_LIMIT: 42,
    Reason.RATE_LIMIT: 43,
    Reason.NEVER_FITS: 44,
    Reason.QUEUE_FULL: 45,
    Reason.WAIT_TOO_LONG: 46,
}

BY_CODE: Final[dict[int, Reason | Outcome]] = {
    **{code: outcome for outcome, code in OUTCOME_CODES.items()},
    **{code: reason for reason, code in REASON_CODES.items()},
}


class RetryAfter(Enum):
    """Rule that gives the `Retry-After` header of an answer."""

    NONE = "no header"
    ONE_SECOND = "one second"
    WINDOW_END = "when the blocking budget window ends"
    BUCKET_REFILL = "when the bucket holds what the request needs"
    FREE_PLACE = "when one place is expected to be free"
    WAIT_UNDER_BOUND = "when the estimated wait falls under the class's bound"


NO_SERVING_SLOT_RETRY_S: Final = 30
"""Retry-After, in seconds, of queue refusals while no slot serves the class."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the client sees: status, the OpenAI error's type, code and param, and how to retry.

    `should_retry` is the `x-should-retry` header: False sends "false", None sends no header.
    """

    status: int
    error_type: str | None
    error_code: str | None
    retry_after: RetryAfter = RetryAfter.NONE
    should_retry: bool | None = None
    param: str | None = None


_DENIED: Final = "permission_error"
_INVALID: Final = "invalid_request_error"
_LIMIT: Final = "rate_limit_error"
_SERVER: Final = "server_error"

ANSWERS: Final[dict[Reason | Outcome, Answer]] = {
    Reason.KEY_UNKNOWN: Answer(401, "authentication_error", "invalid_api_key", should_retry=False),
    Reason.KEY_REVOKED: Answer(401, "authentication_error", "key_revoked", should_retry=False),
    Reason.KEY_EXPIRED: Answer(401, "authentication_error", "key_expired", should_retry=False),
    Reason.TENANT_SUSPENDED: Answer(403, _DENIED, "tenant_suspended", should_retry=False),
    Reason.CLASS_NOT_ALLOWED: Answer(403, _DENIED, "class_not_allowed", should_retry=False),
    Reason.MODEL_NOT_ALLOWED: Answer(403, _DENIED, "model_not_allowed", should_retry=False, param="model"),
    Reason.PROMPT_TOO_LONG: Answer(400, _INVALID, "context_length_exceeded", should_retry=False, param="messages"),
    Reason.OUTPUT_TOO_LONG: Answer(400, _INVALID, "context_length_exceeded", should_retry=False, param="max_tokens"),
    Reason.BUDGET_EXHAUSTED: Answer(
        429, "insufficient_quota", "insufficient_quota", RetryAfter.WINDOW_END, should_retry=False
    ),
    Reason.NO_LEASE: Answer(503, _SERVER, "no_lease", RetryAfter.ONE_SECOND),
    Reason.CONCURRENCY_LIMIT: Answer(429, _LIMIT, "concurrency_limit", RetryAfter.ONE_SECOND),
    Reason.RATE_LIMIT: Answer(429, _LIMIT, "rate_limit_exceeded", RetryAfter.BUCKET_REFILL),
    Reason.NEVER_FITS: Answer(400, _INVALID, "never_fits", should_retry=False),
    Reason.QUEUE_FULL: Answer(429, _LIMIT, "queue_full", RetryAfter.FREE_PLACE),
    Reason.WAIT_TOO_LONG: Answer(429, _LIMIT, "wait_too_long", RetryAfter.WAIT_UNDER_BOUND),
    Outcome.COMPLETED: Answer(200, None, None),
    # 499 is the status that proxies log when the client went away first; nobody receives it.
    Outcome.CANCELLED_BY_CLIENT: Answer(499, None, None),
    Outcome.CANCELLED_BY_DRAIN: Answer(503, _SERVER, "cancelled_by_drain", RetryAfter.ONE_SECOND),
    Outcome.DISPLACED: Answer(503, _SERVER, "displaced", RetryAfter.ONE_SECOND),
    Outcome.QUEUE_TIMEOUT: Answer(504, _SERVER, "queue_timeout"),
    Outcome.STAGE_TIMEOUT: Answer(504, _SERVER, "stage_timeout"),
    Outcome.UPSTREAM_ERROR: Answer(502, _SERVER, "upstream_error"),
    Outcome.LOST: Answer(502, _SERVER, "lost"),
}


def answer_for(why: Reason | Outcome) -> Answer:
    """The client's answer for a refusal or an end; every member of both enums has one."""
    return ANSWERS[why]
