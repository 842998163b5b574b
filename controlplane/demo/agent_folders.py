"""State folders of the demo's agents that another database knows: a folder's key and records are worth nothing here."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from controlplane.agent.identity import IDENTITY_FILE, StoredIdentity

SET_ASIDE_MOST = 1_000


def set_aside_strangers(agents: Path, enrolled: Mapping[str, str]) -> list[Path]:
    """Move away the folders whose agent this database does not know; returns where they are now.

    `enrolled` are the ids of the database's agents by name. Nothing is deleted: the spool in a folder may hold records
    that its own database still wants. Raises OSError when a folder cannot be moved.
    """
    moved = []
    for folder in sorted(agents.glob("*")):
        known_as = _known_as(folder)
        if known_as is not None and known_as not in enrolled.values():
            moved.append(
                folder.rename(_free_place(agents.with_name(f"{agents.name}-of-another-database"), folder.name))
            )
    return moved


def agents_here(agents: Path) -> dict[str, str]:
    """The ids that the folders' agents were given, by folder; those that have not enrolled are missing."""
    known = {folder.name: _known_as(folder) for folder in sorted(agents.glob("*"))}
    return {name: agent for name, agent in known.items() if agent}


def _known_as(folder: Path) -> str | None:
    """The id that enrolment gave; None when the agent has not enrolled. A file that cannot be read is no agent's."""
    try:
        return msgspec.json.decode((folder / IDENTITY_FILE).read_bytes(), type=StoredIdentity).agent
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError:
        return ""


def _free_place(parent: Path, name: str) -> Path:
    parent.mkdir(mode=0o700, exist_ok=True)
    for number in range(1, SET_ASIDE_MOST + 1):
        place = parent / f"{name}-{number}"
        if not place.exists():
            return place
    raise OSError(f"{parent} holds {SET_ASIDE_MOST} folders of {name}: remove those that nobody needs")
