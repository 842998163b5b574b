"""A reason is there, without spaces around it, and no longer than the log keeps."""

import pytest
from django.core.exceptions import ValidationError

from controlplane.audit.reasons import REASON_CHARS_MAX, checked_reason


def test_a_reason_is_kept_without_the_spaces_around_it():
    assert checked_reason("  load test \n") == "load test"
    assert checked_reason("x" * REASON_CHARS_MAX + " ") == "x" * REASON_CHARS_MAX


@pytest.mark.parametrize(("reason", "told"), [("", "Say why"), (" \n", "Say why"), ("x" * 401, "at most 400")])
def test_no_reason_and_a_long_one_are_told_at_their_field(reason: str, told: str):
    with pytest.raises(ValidationError) as caught:
        checked_reason(reason)
    assert told in caught.value.message_dict["reason"][0]
