"""Sessions in the database, with whose they are, from where, and when they were last used.

What a list of sessions shows is kept inside the session, and copied into columns whenever it is saved: a session keeps
its public id when its key changes.
"""

import uuid
from datetime import datetime, timedelta
from typing import Any

from django.apps import apps
from django.contrib.auth import SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.utils import timezone

ABOUT = "about"
SECOND_FACTOR = "second_factor"
AGENT_CHARS_MAX = 300
USED_EVERY = timedelta(minutes=1)


class SessionStore(DatabaseStore):
    """Django's own store over our table; `last_used_at` is that of the row as it was read."""

    last_used_at: datetime | None = None

    @classmethod
    def get_model_class(cls) -> Any:
        return apps.get_model("access", "Session")

    def _get_session_from_db(self) -> Any:
        row = super()._get_session_from_db()  # type: ignore[misc]
        self.last_used_at = row.last_used_at if row is not None else None
        return row

    def create_model_instance(self, data: dict[str, Any]) -> Any:
        if SESSION_KEY in data:
            data.setdefault(ABOUT, about())
        row: Any = super().create_model_instance(data)
        row.last_used_at = timezone.now()
        if SESSION_KEY in data:
            told = data[ABOUT]
            row.user_id = int(data[SESSION_KEY])
            row.public_id, row.began_at = uuid.UUID(told["id"]), datetime.fromisoformat(told["began_at"])
            row.address, row.agent, row.method = told["address"], told["agent"], told["method"]
        return row


def about(*, address: str = "", agent: str = "", method: str = "") -> dict[str, str]:
    """What is known of a session that begins now; strings, for it lies inside the session."""
    return {
        "id": str(uuid.uuid4()), "began_at": timezone.now().isoformat(), "address": address[:45],
        "agent": agent[:AGENT_CHARS_MAX], "method": method[:20],
    }  # fmt: skip
