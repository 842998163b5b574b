"""The reason that a person gives for a change, as the audit log keeps it."""

from django.core.exceptions import ValidationError

REASON_CHARS_MAX = 400


def checked_reason(reason: str) -> str:
    """The reason without spaces around it. Raises ValidationError on `reason` when it is empty or too long."""
    reason = reason.strip()
    if not reason:
        raise ValidationError({"reason": "Say why: the reason is kept in the audit log."}, code="required")
    if len(reason) > REASON_CHARS_MAX:
        raise ValidationError({"reason": f"Use at most {REASON_CHARS_MAX} characters."})
    return reason
