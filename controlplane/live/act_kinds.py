"""Which entries of the audit log are acts of on-call with a page that measures what came of them."""

from typing import Final

ACTS: Final = (
    "flex.recall", "flex.freeze", "flex.unfreeze", "agent.drain", "agent.undrain", "tenant.suspend", "tenant.resume",
)  # fmt: skip
