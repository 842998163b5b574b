"""How an agent enrols and how a process of it begins. Golden files pin the bytes."""

from msgspec import Struct


class Enrol(Struct, frozen=True):
    """`token` is used up by it; `public_key` is base64url of 32 bytes (Ed25519); `slots` how many the agent can run."""

    token: str
    public_key: str
    name: str
    software: str
    slots: int
    address: str = ""


class Enrolled(Struct, frozen=True):
    """Who the agent is from now on. Not `approved`: an admin has to let it in before it may say hello."""

    agent: str
    agent_id: int
    pool: str
    installation: str
    signing_keys: dict[str, str]
    """kid -> public key (base64); uses are told apart by `policy:`, `live:` and `nudge:` before the kid."""
    approved: bool
    broker: str = ""


class Hello(Struct, frozen=True):
    """A process begins. `spooled_epochs` are earlier ones whose reports it still holds."""

    software: str
    boot_id: str
    spooled_epochs: list[int] = []
    address: str = ""


class Helloed(Struct, frozen=True):
    """The epoch that fences every earlier process of the agent, and what it needs to work."""

    epoch: int
    agent_id: int
    pool: str
    installation: str
    signing_keys: dict[str, str]
    accepted_through: dict[str, int]
    """epoch -> last accepted seq, for the epochs the agent still has spooled."""
    interval_ms: int
    server_time_us: int
    broker: str = ""
    report_forms: list[str] = []
    """What reports may be sent as besides JSON; see `wire.packed`."""
    generation: int = 0
    """That of `wire.report.Answer`; 0 from a control plane that does not tell."""
