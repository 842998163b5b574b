"""What stops an agent, each with a sentence that says what to do."""

RETIRED_STATUS = 3
"""The exit status of an agent that was retired: no new start is of use."""


class AgentError(Exception):
    """The agent cannot go on; the text is printed as one line."""


class UsageError(AgentError):
    """Options that cannot be used; exit status 2."""


class Superseded(AgentError):
    """A newer process of this agent holds the epoch."""


class Retired(AgentError):
    """The control plane does not know this agent any more."""


class Unreachable(Exception):
    """The control plane did not answer; worth another try."""


class Refused(Exception):
    """The control plane answered with a problem document."""

    def __init__(self, status: int, code: str, detail: str, expected: int | None = None) -> None:
        super().__init__(f"{status} {code}: {detail}" if detail else f"{status} {code}")
        self.status = status
        self.code = code
        self.detail = detail
        self.expected = expected
