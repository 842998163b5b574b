"""Beat's scheduler: Celery's, on a clock that may be set back.

Celery remembers when each entry last ran. With a clock that was an hour ahead nothing would run for an hour after it
was set right, whether beat was started again or not.
"""

from typing import Any

from celery.beat import PersistentScheduler


class Scheduler(PersistentScheduler):
    """An entry that ran in the future ran now: it waits for its interval and no longer."""

    def tick(self, *args: Any, **options: Any) -> float:
        """Sends what is due; seconds until there is something to do again."""
        self._come_back()
        return float(super().tick(*args, **options))

    def _come_back(self) -> None:
        now = self.app.now()
        ahead = [entry for entry in self.schedule.values() if entry.last_run_at > now]
        for entry in ahead:
            entry.last_run_at = now
        if ahead:
            # Celery's queue is in the order of the old clock.
            self._heap = None
