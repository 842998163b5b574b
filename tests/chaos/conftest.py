"""The small fleet of the agents' tests, for processes that are killed."""

from tests.agent.conftest import world

__all__ = ["world"]
