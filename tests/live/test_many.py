"""Live pages of a large installation: what needs somebody is shown, the rest counted; as many statements as for few."""

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.contracts.models import Contract
from controlplane.live import alerting, contracts, readings, topics
from controlplane.live.attention import GRADES
from controlplane.live.in_force import in_force
from tests import factories
from tests.live.scene import contract_row, objective, say
from tests.live.test_pages import body, person

pytestmark = pytest.mark.django_db
MANY = 70


@pytest.fixture
def oncall(installation):
    return person("oncall")


@pytest.fixture
def many(scene, moment):
    """Contracts with requests and without, of classes and of tenants, and agents that were never heard."""
    klass, pool = scene.chat, scene.pool
    tenants = [factories.tenant(f"own-{number}") for number in range(3)]
    for number in range(MANY):
        tenant = tenants[number % 3] if number % 2 else None
        _, version = contract_row(f"many-{number:02}", klass, moment, tenant=tenant)
        if number % 3 == 0:
            objective(version, pool, moment - timedelta(minutes=3), 1_000, number % 7)
        say(factories.agent(pool, f"quiet-{number:02}"), moment - timedelta(minutes=5), None)
    return scene


def test_rows_are_the_first_in_the_order_of_attention_and_every_contract_is_counted(many, moment):
    reading = readings.read(moment)
    state = topics.fleet(reading)
    rows = state["contracts"]
    assert len(rows) == topics.CONTRACTS_SHOWN
    assert state["contracts_more"] == Contract.objects.filter(archived_at=None).count() - len(rows)
    assert sum(state["counts"].values()) == len(rows) + state["contracts_more"]
    places = [(GRADES.index(row["grade"]), -(row["burn_5m"] or 0)) for row in rows]
    assert places == sorted(places)
    judged = contracts.evaluate(in_force(moment), moment).values()
    assert state["counts"]["ok"] == sum(one.grade == "ok" for one in judged)
    worst = [row["key"] for row in rows if row["grade"] in ("bad", "risk")]
    assert set(worst) >= {one.contract.slug for one in judged if one.grade in ("bad", "risk")}


def test_a_row_has_the_grade_it_was_sorted_and_counted_by(many, moment):
    state = topics.fleet(readings.read(moment))
    shown = {grade: sum(row["grade"] == grade for row in state["contracts"]) for grade in GRADES}
    first = next(grade for grade in reversed(GRADES) if shown[grade])
    for grade in GRADES[: GRADES.index(first)]:
        assert shown[grade] == state["counts"][grade], "what is worse than the last row is shown whole"


def test_agents_and_alerts_beyond_the_first_are_counted(many, moment):
    reading = readings.read(moment)
    state = topics.fleet(reading)
    assert len(state["agents"]) == topics.AGENTS_SHOWN
    troubled = len(state["agents"]) + state["agents_more"]
    assert troubled >= MANY and state["agents_meta"].startswith(f"{troubled} silent")
    assert len(state["alerts"]) + state["alerts_more"] == len(alerting.alert_rows(reading))


def test_the_pages_say_how_many_more_there_are(many, oncall, moment):
    page = body(oncall, "home")
    # of the same instant: agents that were heard when the scene was made have fallen silent by now on a busy machine
    state = topics.fleet(readings.read(timezone.now()))
    for name in ("contracts_more", "agents_more"):
        assert re.search(f'data-if="{name}"><span[^>]*data-t="{name}"[^>]*>{state[name]}<', page), name
    assert 'data-if="alerts_more" hidden' in page, "all are shown"
    assert page.count("many-") < 3 * topics.CONTRACTS_SHOWN


@pytest.mark.parametrize(("name", "most"), [("home", 45), ("api-alerts", 42), ("api-slo-status", 12)])
def test_as_many_statements_for_many_as_for_few(scene, oncall, moment, request, name, most):
    def statements():
        with CaptureQueriesContext(connection) as found:
            assert oncall.get(reverse(name)).status_code == 200
        return len(found)

    statements()
    before = statements()
    request.getfixturevalue("many")
    statements()  # what is remembered of contracts is read again when there are others
    assert statements() == before <= most


def test_the_burn_is_worked_out_from_the_same_counts_as_the_judgement(many, moment):
    rows = in_force(moment)
    for evaluation in contracts.evaluate(rows, moment).values():
        judged = evaluation.own.burn_rate
        within = evaluation.burn[contracts.FIVE_MINUTES_S]
        assert evaluation.version.window_s == 900
        if judged is None:
            assert within is None
        elif evaluation.contract.slug.startswith("many-"):
            assert within == float(judged), "all of its requests lie in the last five minutes"
