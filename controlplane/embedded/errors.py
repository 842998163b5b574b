"""Errors of the embedded servers: each message says what is wrong and what to do."""

from __future__ import annotations


class EmbeddedError(RuntimeError):
    """A server could not be prepared, started or stopped; the message is meant for the person at the terminal."""


class DiskFullError(EmbeddedError):
    """There is no room left where the server keeps its data."""


class PortTakenError(EmbeddedError):
    """Another program listens on the port that was asked for."""
