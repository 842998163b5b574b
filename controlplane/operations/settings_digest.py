"""A digest of the settings that shape an installation, so that a restore can name those that differ.

Listed by name: what is not listed (secrets, addresses with passwords in them) cannot get into a backup by accident.
"""

from __future__ import annotations

import hashlib
from typing import Final

from django.conf import settings

COMPARED: Final = (
    "ALLOWED_HOSTS", "CSRF_TRUSTED_ORIGINS", "INSECURE_LOOPBACK", "PUBLIC_URL", "SECOND_FACTOR_ROLES", "AGENT_APPROVAL",
    "POLICY_ACCEPT_S", "USAGE_RECORD_DAYS", "USAGE_ARCHIVE", "EXPERIMENT_INPUT_DAYS", "HISTORY_DAYS", "SIGNING_KEY_DIR",
    "JOB_STORAGE", "JOB_FILE_LIMIT_BYTES", "JOB_FILE_DAYS", "JOB_ROW_DAYS", "OUTAGE_SLICE_PERCENT", "TIME_ZONE",
)  # fmt: skip


def setting_digests() -> dict[str, str]:
    """Name -> SHA-256 of the value's text."""
    return {name: _digest(_text(getattr(settings, name))) for name in COMPARED}


def overall(digests: dict[str, str]) -> str:
    """One digest of all."""
    return _digest("\n".join(f"{name} {digest}" for name, digest in sorted(digests.items())))


def differing(saved: dict[str, str]) -> list[str]:
    """Names of settings whose value is not the saved one, or that only one side knows."""
    own = setting_digests()
    return sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))


def _text(value: object) -> str:
    if isinstance(value, frozenset | set):
        return repr(sorted(value))
    return str(value) if not isinstance(value, list | tuple) else repr(list(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
