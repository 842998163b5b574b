"""Calendar work after beat was away: once each, soon, and whatever its clock had said before."""

from collections import Counter
from datetime import UTC, datetime, timedelta

import pytest
from celery import Celery

from controlplane.config.beat import Scheduler
from controlplane.config.celery import app

SLACK_S = 10


@pytest.fixture
def start(tmp_path):
    """Starts beat's scheduler on its file; messages go to a broker in memory, its own one for each start."""
    started = []

    def begin() -> Scheduler:
        mine = Celery(f"beat-{tmp_path.name}-{len(started)}", broker="memory://", set_as_current=False)
        mine.conf.update(
            beat_schedule=app.conf.beat_schedule, timezone=app.conf.timezone, enable_utc=app.conf.enable_utc,
            task_default_queue=f"{tmp_path.name}-{len(started)}", task_ignore_result=True,
            result_expires=app.conf.result_expires,
        )  # fmt: skip
        started.append(Scheduler(mine, schedule_filename=str(tmp_path / "schedule")))
        return started[-1]

    yield begin
    for scheduler in started:
        scheduler.close()


def tick(scheduler: Scheduler) -> float:
    """Ticks until nothing is due; seconds to the next one."""
    for _ in range(3 * len(scheduler.schedule)):
        if wait_s := scheduler.tick():
            return wait_s
    raise AssertionError("what is due does not end")


def sent(scheduler: Scheduler) -> Counter[str]:
    found: Counter[str] = Counter()
    with scheduler.app.connection_for_read() as connection:
        queue = connection.SimpleQueue(scheduler.app.conf.task_default_queue)
        while queue.qsize():
            message = queue.get(block=False)
            message.ack()
            found[message.headers["task"]] += 1
        queue.close()
    return found


def left(scheduler: Scheduler, last: datetime) -> None:
    """Beat ended when every entry had last run at this instant."""
    for entry in scheduler.schedule.values():
        entry.last_run_at = last
    scheduler.sync()
    scheduler.close()


def test_after_hours_without_beat_each_job_runs_once_and_not_once_for_every_time_that_it_missed(start):
    left(start(), datetime.now(UTC) - timedelta(hours=6))
    again = start()
    wait_s = tick(again)
    assert sent(again) == Counter(entry["task"] for entry in app.conf.beat_schedule.values())
    assert wait_s <= min(entry["schedule"] for entry in app.conf.beat_schedule.values())


@pytest.mark.parametrize("ago_s", [-86_400, -3_600, -60, -1, 0, 3, 7, 59, 1_800, 86_400])
def test_whenever_beat_starts_again_no_job_waits_longer_than_its_interval(start, ago_s):
    """Negative: the clock was ahead when it ran last, and was set right."""
    left(start(), datetime.now(UTC) - timedelta(seconds=ago_s))
    again = start()
    tick(again)
    now = datetime.now(UTC)
    for entry in again.schedule.values():
        due, wait_s = entry.is_due()
        assert due or wait_s <= entry.schedule.run_every.total_seconds(), entry.name
        assert entry.last_run_at <= now


def test_a_clock_that_is_set_back_while_beat_runs_puts_nothing_off(start):
    scheduler = start()
    tick(scheduler)
    for entry in scheduler.schedule.values():
        entry.last_run_at += timedelta(hours=1)
    scheduler.populate_heap()
    tick(scheduler)
    for event in scheduler._heap:
        interval_s = event.entry.schedule.run_every.total_seconds()
        assert event.time <= datetime.now().timestamp() + interval_s + SLACK_S, event.entry.name
