from datetime import date, time
from fractions import Fraction

import pytest

from controlplane.core.batch_objective import BatchJob, BatchNight, BatchObjective, batch_night, judge_night
from controlplane.core.period import from_us, load_zone
from controlplane.core.slo import UnknownReason, Verdict

HOUR = 3_600_000_000
OBJECTIVE = BatchObjective(load_zone("Europe/Berlin"), time(20), time(6), Fraction(98, 100), 2 * HOUR)


def night_of(day: date) -> BatchNight:
    return batch_night(OBJECTIVE, day)


def jobs(night: BatchNight, finished: int, total: int) -> list[BatchJob]:
    at = night.admission.end_us - HOUR
    done = [BatchJob(at, at + HOUR, night.due_us)] * finished
    return done + [BatchJob(at, at + HOUR, night.due_us + 1)] * (total - finished)


@pytest.mark.parametrize(("day", "hours"), [(date(2026, 3, 28), 9), (date(2026, 10, 24), 11), (date(2026, 6, 1), 10)])
def test_a_night_is_as_long_as_its_wall_clocks(day: date, hours: int) -> None:
    night = night_of(day)
    assert night.due_us - night.admission.end_us == hours * HOUR
    assert night.admission.start == batch_night(OBJECTIVE, date.fromordinal(day.toordinal() - 1)).admission.end


def test_a_due_time_after_the_cut_off_is_the_same_day() -> None:
    objective = BatchObjective(load_zone("UTC"), time(8), time(18), Fraction(1, 2))
    night = batch_night(objective, date(2026, 6, 1))
    assert (from_us(night.due_us).day, night.due_us - night.admission.end_us) == (1, 10 * HOUR)


def test_the_share_finished_by_the_due_instant_decides() -> None:
    night = night_of(date(2026, 6, 1))
    after = night.due_us + HOUR
    assert judge_night(OBJECTIVE, night, jobs(night, 98, 100), after).verdict is Verdict.MET
    missed = judge_night(OBJECTIVE, night, jobs(night, 97, 100), after)
    assert (missed.verdict, missed.share, missed.finished_in_time) == (Verdict.MISSED, Fraction(97, 100), 97)


def test_a_job_that_waits_too_long_for_its_first_attempt_misses() -> None:
    night = night_of(date(2026, 6, 1))
    at = night.admission.end_us - HOUR
    just = BatchJob(at, at + 2 * HOUR, at + 3 * HOUR)
    late = BatchJob(at, at + 2 * HOUR + 1, at + 3 * HOUR)
    assert judge_night(OBJECTIVE, night, [just], night.due_us).verdict is Verdict.MET
    assert judge_night(OBJECTIVE, night, [late], night.due_us).verdict is Verdict.MISSED
    waiting = [BatchJob(at)]
    assert judge_night(OBJECTIVE, night, waiting, at + 2 * HOUR).unknown_reason is UnknownReason.NOT_YET_DUE
    assert judge_night(OBJECTIVE, night, waiting, at + 2 * HOUR + 1).waited_too_long == 1


def test_a_verdict_comes_as_soon_as_it_is_certain() -> None:
    night = night_of(date(2026, 6, 1))
    at = night.admission.end_us - HOUR
    done, running = BatchJob(at, at, at + HOUR), BatchJob(at, at)
    now = night.admission.end_us + HOUR
    assert judge_night(OBJECTIVE, night, [done] * 98 + [running] * 2, now).verdict is Verdict.MET
    assert judge_night(OBJECTIVE, night, [done] * 97 + [running] * 3, now).verdict is Verdict.UNKNOWN
    # before the cut-off more jobs may come
    assert judge_night(OBJECTIVE, night, [BatchJob(at, at, at + 1)], at + 2).verdict is Verdict.UNKNOWN


def test_jobs_of_other_nights_do_not_count_and_none_is_unknown() -> None:
    night = night_of(date(2026, 6, 1))
    other = [BatchJob(night.admission.end_us, night.admission.end_us, None)]
    result = judge_night(OBJECTIVE, night, other, night.due_us)
    assert (result.verdict, result.unknown_reason, result.share) == (Verdict.UNKNOWN, UnknownReason.SILENCE, None)
    backwards = [BatchJob(night.admission.start_us + 5, night.admission.start_us + 4)]
    assert judge_night(OBJECTIVE, night, backwards, night.due_us).unknown_reason is UnknownReason.NONSENSE
