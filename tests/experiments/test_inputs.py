"""Inputs end after the days that operators set, and stay where something needs them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import DatabaseError, connection, connections, transaction
from django.urls import reverse
from django.utils import timezone

from controlplane.experiments import actions, inputs, tasks
from controlplane.experiments.models import Experiment, InputFile
from controlplane.policy.models import Revision
from tests import factories
from tests.experiments.test_later import REPLAY, values_of
from tests.experiments.test_pages import ADA, page

DAYS = 30
DRAFT = "d" * 64


@pytest.fixture(autouse=True)
def days(settings):
    settings.EXPERIMENT_INPUT_DAYS = DAYS


def one(seed: int, days_ago: float, **fields) -> Experiment:
    """An experiment that ended so long ago, with a trace of its own by seed."""
    at = timezone.now() - timedelta(days=days_ago)
    given = values_of("replay", {**REPLAY, "minutes": "1", "seed": str(seed)})
    row = actions.ask(kind="replay", title=f"one {seed}", values=given, actor=ADA, now=at)
    Experiment.objects.filter(pk=row.pk).update(**{"state": "done", "ended_at": at, **fields})
    return Experiment.objects.get(pk=row.pk)


def kept(row: Experiment) -> bool:
    return not inputs.gone(row)


@pytest.mark.django_db(transaction=True)
def test_what_is_old_ends_and_what_something_needs_stays(people):
    at = factories.NOW
    Revision.objects.create(
        created_at=at, created_by="ada", reason="x", digest=DRAFT, configuration={}, not_before=at, accept_until=at
    )
    old, twice = one(1, 60), one(2, 60)
    stays = [
        one(3, 60, share_token="t"), one(4, 60, evidence=True), one(5, 60, draft_digest=DRAFT), one(6, 20),
        one(7, 60, state="waiting", ended_at=None), one(2, 10),
    ]  # fmt: skip
    never_pushed = one(8, 60, draft_digest="e" * 64)
    assert twice.inputs == stays[-1].inputs
    assert tasks.end_inputs() == 2 and inputs.end_old(timezone.now()) == 0
    assert [kept(row) for row in (old, never_pushed)] == [False, False]
    assert all(map(kept, [twice, *stays]))
    with pytest.raises(ValidationError, match="have ended: ask anew"):
        actions.rerun(experiment_id=old.pk, actor=ADA, now=timezone.now())
    with pytest.raises(ValueError, match="not what was kept"):
        inputs.read(old)
    shown = page(people["admin"], old)
    assert "Its inputs have ended" in shown and "Run again" not in shown
    people["admin"].post(reverse("experiment-rerun", args=[old.pk]))
    assert "Run again" in page(people["admin"], stays[0]) and Experiment.objects.count() == 9
    actions.share(experiment_id=stays[0].pk, shared=False, actor=ADA, now=timezone.now())
    assert inputs.end_old(timezone.now()) == 1 and not kept(stays[0])


@pytest.mark.django_db(transaction=True)
def test_the_database_ends_them_by_its_function_only_and_never_young_ones():
    one(1, 60)
    young = one(2, 3)
    with transaction.atomic():
        assert inputs.end_old(timezone.now()) == 1
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            InputFile.objects.all().delete()
    with pytest.raises(DatabaseError, match="7 days or longer"), connection.cursor() as cursor:
        cursor.execute("SELECT experiments_end_inputs(now(), 10)")
    assert kept(young)


@pytest.mark.django_db(transaction=True)
def test_who_refers_to_an_old_file_keeps_it_from_ending_meanwhile():
    old = one(1, 60)
    found: list[int] = []

    def work() -> None:
        try:
            found.append(inputs.end_old(timezone.now()))
        finally:
            connections.close_all()

    thread = threading.Thread(target=work)
    with transaction.atomic():
        again = actions.rerun(experiment_id=old.pk, actor=ADA, now=timezone.now())
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and found == []
    thread.join(60)
    assert found == [0] and kept(again)


@pytest.mark.django_db
@pytest.mark.parametrize(("setting", "raises"), [(0, False), (6, True), (-1, True), (7, False)])
def test_the_setting_is_nothing_or_a_week_and_more(settings, setting, raises):
    settings.EXPERIMENT_INPUT_DAYS = setting
    if raises:
        with pytest.raises(ImproperlyConfigured, match="7 or more"):
            inputs.end_old(timezone.now())
    else:
        assert inputs.keep_days() == setting and inputs.end_old(timezone.now()) == 0
