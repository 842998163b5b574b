"""The table of reasons and outcomes: closed, complete, with stable codes."""

from controlplane.core.reasons import ANSWERS, BY_CODE, Outcome, Reason, RetryAfter, answer_for


def test_every_reason_and_outcome_has_an_answer_and_a_code_of_its_own() -> None:
    members = [*Reason, *Outcome]
    assert set(ANSWERS) == set(members)
    assert len({member.code for member in members}) == len(members) == len(BY_CODE)
    assert all(BY_CODE[member.code] is member for member in members)


def test_codes_do_not_move() -> None:
    assert [outcome.code for outcome in Outcome] == list(range(1, 9))
    assert [reason.code for reason in Reason] == list(range(32, 47))


def test_precedence_is_the_order_of_the_checks() -> None:
    assert list(Reason) == [
        "key_unknown",
        "key_revoked",
        "key_expired",
        "tenant_suspended",
        "class_not_allowed",
        "model_not_allowed",
        "prompt_too_long",
        "output_too_long",
        "budget_exhausted",
        "no_lease",
        "concurrency_limit",
        "rate_limit",
        "never_fits",
        "queue_full",
        "wait_too_long",
    ]


def test_status_of_each() -> None:
    by_status: dict[int, set[str]] = {}
    for member in [*Reason, *Outcome]:
        by_status.setdefault(answer_for(member).status, set()).add(member.value)
    assert by_status[401] == {"key_unknown", "key_revoked", "key_expired"}
    assert by_status[403] == {"tenant_suspended", "class_not_allowed", "model_not_allowed"}
    assert by_status[400] == {"prompt_too_long", "output_too_long", "never_fits"}
    assert by_status[429] == {"budget_exhausted", "concurrency_limit", "rate_limit", "queue_full", "wait_too_long"}
    assert by_status[503] == {"no_lease", "displaced", "cancelled_by_drain"}
    assert by_status[504] == {"queue_timeout", "stage_timeout"}


def test_clients_are_told_not_to_retry_what_cannot_succeed() -> None:
    for member, answer in ANSWERS.items():
        hopeless = answer.status in (400, 401, 403) or member is Reason.BUDGET_EXHAUSTED
        assert answer.should_retry is (False if hopeless else None)


def test_every_429_says_when_to_come_back() -> None:
    assert all(answer.retry_after is not RetryAfter.NONE for answer in ANSWERS.values() if answer.status == 429)
    assert ANSWERS[Reason.BUDGET_EXHAUSTED].error_code == "insufficient_quota"
    assert ANSWERS[Reason.PROMPT_TOO_LONG].error_code == "context_length_exceeded"
