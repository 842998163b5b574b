"""What a tenant can do about a refusal, by its reason; the operator's side stands in docs/on-call.md."""

from django import template

from controlplane.core.reasons import Reason

register = template.Library()

REMEDIES: dict[Reason, str] = {
    Reason.KEY_UNKNOWN: "Check the key that the client sends; a new one works after 2 seconds.",
    Reason.KEY_REVOKED: "Use another key: this one was revoked for good.",
    Reason.KEY_EXPIRED: "Ask for a new key, or for a later end of this one.",
    Reason.TENANT_SUSPENDED: "Ask your operator: the organisation or the class is suspended.",
    Reason.CLASS_NOT_ALLOWED: "Name a class that the key allows, or ask for the class to be added to it.",
    Reason.MODEL_NOT_ALLOWED: "Name a model that GET /v1/models lists for the key.",
    Reason.PROMPT_TOO_LONG: "Shorten the prompt, or send it in parts.",
    Reason.OUTPUT_TOO_LONG: "Ask for a smaller max_tokens.",
    Reason.BUDGET_EXHAUSTED: "Wait for the budget's next window, or ask for a higher limit.",
    Reason.NO_LEASE: "Try again after retry-after; if it goes on, tell your operator.",
    Reason.CONCURRENCY_LIMIT: "Send fewer requests at once, or ask for a higher limit.",
    Reason.RATE_LIMIT: "Slow down to what retry-after says.",
    Reason.NEVER_FITS: "Shorten prompt and max_tokens: no slot is large enough.",
    Reason.QUEUE_FULL: "Try again after retry-after, or move work that can wait to a batch class.",
    Reason.WAIT_TOO_LONG: "Try again after retry-after, or move work that can wait to a batch class.",
}


@register.filter
def remedy(reason: str) -> str:
    """A sentence, or a dash for a reason of a later release."""
    try:
        return REMEDIES[Reason(reason)]
    except ValueError:
        return "—"
