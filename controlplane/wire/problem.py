"""How the control plane refuses what an agent sends. A golden file pins the bytes."""

from msgspec import Struct, field


class Problem(Struct, frozen=True):
    """RFC 9457. `code` is closed: superseded, conflict, expected, unknown_agent, bad_signature, sealed, too_large,
    unreadable, token_used, token_expired, token_unknown, must_upgrade, retired, not_served, busy, not_found,
    unknown_epoch."""

    type: str
    title: str
    status: int
    code: str
    detail: str = ""
    expected: int | None = field(default=None)
