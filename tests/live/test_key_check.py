"""A dry run of a key: what agents would answer, by policy in force, live list, budgets and what they last reported."""

from datetime import UTC, datetime

import msgspec
import pytest

from controlplane.budgets.actions import create_budget
from controlplane.contracts.models import WorkloadClass
from controlplane.core.period import to_us
from controlplane.fleet.models import Agent, AgentLive
from controlplane.ledger.models import RateCard
from controlplane.live.key_check import Asked, answers
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.wire.report import ClassLive, LiveFigures, TenantLive
from tests import factories
from tests.agent.control_planes import ACTOR, push_policy
from tests.world import build_world

pytestmark = pytest.mark.django_db
ASKED = Asked("chat", "llama-70b", 500, 200)


@pytest.fixture
def world(db):
    made = build_world()
    RateCard.objects.create(
        class_slug="bulk", model=made.pool.model, effective_from=factories.NOW, prompt_nanos_per_mtok=1,
        cached_nanos_per_mtok=1, output_nanos_per_mtok=1, created_at=factories.NOW, created_by="fin",
    )  # fmt: skip
    WorkloadClass.objects.filter(slug="chat").update(max_queue=5, max_wait_ms=2_000, max_prompt_tokens=8_000)
    return made


@pytest.fixture
def serving(world):
    """The same pushed, with an agent that has every slot."""
    agent = factories.agent(world.pool, "gpu-1")
    for slot in world.slots:
        slot.agent = agent
        slot.save()
    push_policy()
    return world


def say(agent: Agent, world, *, depth: int = 0, running: int = 0, ago_s: float = 1.0) -> None:
    now = datetime.now(UTC)
    common = {"depth": depth, "oldest_age_us": None, "running": running, "arrivals_per_s": 1.0, "departures_per_s": 1.0,
              "residence_mean_us": None, "present_mean": 1.0}  # fmt: skip
    figures = LiveFigures(
        to_us(now), [],
        [ClassLive(world.chat.pk, **common, head_request_id="", head_reason="", admitted_per_s_60s=1.0, departures=1,
                   refused_60s={}, wait_60s=[], ttft_60s=[])],
        [TenantLive(world.chat.pk, world.tenant.pk, counter=0.0, **common)],
    )  # fmt: skip
    AgentLive.objects.update_or_create(
        agent=agent,
        defaults={"epoch": 1, "seq": 1, "figures": msgspec.to_builtins(figures),
                  "reported_at": datetime.fromtimestamp(now.timestamp() - ago_s, UTC)},
    )  # fmt: skip


def answer(world, asked: Asked = ASKED):
    key = ApiKey.objects.select_related("tenant").get(pk=world.key.pk)
    (found,) = answers(key, asked, datetime.now(UTC))
    return found


def refused(found) -> str:
    """The reason, and that the check that the page marks is the first that did not hold."""
    assert (found.grade, found.word) == ("bad", "Refused")
    assert next(check for check in found.checks if check.held is False).first
    return found.reason


def test_without_policy_in_force_no_pool_answers(world):
    assert answers(world.key, ASKED, datetime.now(UTC)) == []


def test_a_request_that_nothing_speaks_against_is_admitted_with_its_charge(serving):
    found = answer(serving)
    assert (found.grade, found.word, found.reason) == ("unknown", "Admitted if nothing runs", "")
    unknown = [(check.name, check.value) for check in found.checks if check.held is None]
    assert ("Queue depth", "") in unknown and len(unknown) == 4, "no figure stands for what nobody reported"
    assert not any(check.held is False for check in found.checks) and not found.reported
    assert found.charge_nanos > 500 * 1_400 + 200 * 4_400 - 1
    say(Agent.objects.get(), serving)
    found = answer(serving)
    assert (found.grade, found.word, found.reason, found.reported) == ("ok", "Admitted", "", True)
    assert all(check.held for check in found.checks)
    say(Agent.objects.get(), serving, ago_s=60)
    assert not answer(serving).reported, "what is old is not known"


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (Asked("chat", "llama-70b", 9_000, 10), "prompt_too_long"),
        (Asked("chat", "llama-70b", 10, 5_000_000), "output_too_long"),
    ],
)
def test_bounds_of_the_class(serving, asked, reason):
    assert refused(answer(serving, asked)) == reason


def test_what_is_revoked_or_suspended_counts_before_any_push(serving):
    Tenant.objects.filter(pk=serving.tenant.pk).update(state="suspended")
    assert refused(answer(serving)) == "tenant_suspended"
    ApiKey.objects.filter(pk=serving.key.pk).update(state="revoked")
    assert refused(answer(serving)) == "key_revoked"


def test_a_class_that_the_key_or_the_tenant_lacks(serving):
    ApiKey.objects.filter(pk=serving.key.pk).update(classes=["bulk"])
    assert refused(answer(serving)) == "class_not_allowed"


def test_a_tenant_that_came_after_the_push_is_not_known_there(serving):
    other = factories.tenant("globex")
    ApiKey.objects.filter(pk=serving.key.pk).update(tenant=other)
    assert refused(answer(serving)) == "class_not_allowed"


def test_limits_count_what_every_agent_reported(serving):
    Tenant.objects.filter(pk=serving.tenant.pk).update(max_concurrency=4)
    push_policy()
    say(Agent.objects.get(), serving, running=3)
    assert answer(serving).word == "Admitted"
    say(Agent.objects.get(), serving, running=3, depth=1)
    assert refused(answer(serving)) == "concurrency_limit"


def test_how_many_requests_of_a_key_run_is_not_known(serving):
    say(Agent.objects.get(), serving)
    ApiKey.objects.filter(pk=serving.key.pk).update(max_concurrency=2)
    assert [check.held for check in answer(serving).checks if check.name.startswith("Key’s requests running")] == [None]


def test_the_queue_is_what_agents_reported(serving):
    say(Agent.objects.get(), serving, depth=1)
    assert answer(serving).word == "Queued" and answer(serving).wait_us > 0
    say(Agent.objects.get(), serving, depth=5)
    assert refused(answer(serving)) == "queue_full"


def test_a_hard_budget_is_told_by_what_is_left(serving):
    now = datetime.now(UTC)
    create_budget(
        tenant_id=serving.tenant.pk, name="month", period="month", zone="UTC", limit_nanos=1_000, hard=True,
        thresholds_percent=[80], actor=ACTOR, reason="t", now=now,
    )  # fmt: skip
    push_policy()
    found = answer(serving)
    assert refused(found) == "budget_exhausted" and found.retry_after_s is not None


def test_the_page_shows_every_check_and_keeps_what_was_asked(serving):
    client = factories.person("viewer")
    address = f"/keys/{serving.key.public_id}/check/"
    assert "Nothing is sent" in client.get(address).content.decode()
    asked = "?workload_class=chat&model=llama-70b&prompt_tokens=9000&output_tokens=10"
    page = client.get(address + asked).content.decode()
    assert "prompt_too_long" in page and 'value="9000"' in page and "Queue depth" in page and "Load unknown" in page
    wrong = client.get(address + asked.replace("9000", "-1"))
    assert wrong.status_code == 400 and "There is a problem" in wrong.content.decode()
    none = client.get(address + asked.replace("workload_class=chat", "workload_class=bulk")).content.decode()
    assert "Admitted" in none or "Refused" in none
    assert factories.person("tenant", name="eve", tenant_row=factories.tenant("globex")).get(address).status_code == 404
