"""The setup guide says what is missing, step by step, and where it is made."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.fleet.models import AgentLive
from controlplane.ledger import rates
from controlplane.operations.setup_guide import guide
from controlplane.policy.actions import push
from controlplane.tenants import key_actions
from controlplane.tenants.models import Tenant
from controlplane.tenants.queries import SETTING_UP
from controlplane.usage.models import RollupDay
from tests import factories
from tests.tenants.conftest import ADMIN

PRICES = {"prompt_nanos_per_mtok": 1, "output_nanos_per_mtok": 1}


def next_of(now):
    step = guide(now).next
    return step.name if step else ""


def test_each_thing_that_is_made_leads_to_the_next(installation, settings, tmp_path):
    settings.SIGNING_KEY_DIR = tmp_path
    now = timezone.now()
    assert next_of(now) == "class"
    factories.workload_class("chat")
    assert next_of(now) == "pool"
    pool = factories.pool("small", batch_class="")
    assert next_of(now) == "slots"
    factories.slot(pool, "i1", "interactive")
    assert next_of(now) == "rates"
    rates.add_cost_rate(pool_slug="small", nanos_per_slot_hour=1, actor=ADMIN, now=now, reason="r")
    assert "1 missing" in {step.found for step in guide(now).steps}
    rates.add_rate_card(class_slug="chat", model="llama-70b", values=PRICES, actor=ADMIN, now=now, reason="r")
    assert next_of(now) == "tenant"
    tenant = factories.tenant("acme", classes=[])
    step = guide(now).next
    assert step.name == "tenant" and step.found == "acme has no class yet" and step.url == "/tenants/acme/edit/"
    Tenant.objects.update(classes=["chat"])
    assert next_of(now) == "push"
    push(actor=ADMIN, reason="first", now=now)
    assert next_of(now) == "agent"
    agent = factories.agent(pool, "gpu-1", state="pending", address="10.0.0.7:9001")
    assert guide(now).next.verb == "Approve it"
    agent.state = "active"
    agent.save(update_fields=["state"])
    AgentLive.objects.create(agent=agent, epoch=1, seq=1, reported_at=now - timedelta(minutes=1))
    assert next_of(now) == "agent", "an agent that is silent serves nothing"
    AgentLive.objects.update(reported_at=now)
    assert next_of(now) == "key" and guide(now).example.agent == "10.0.0.7:9001"
    key_actions.create_key(
        tenant_id=tenant.pk, name="web", classes=["chat"], default_class="chat", actor=ADMIN, now=now
    )
    assert next_of(now) == "request" and not guide(now).finished
    served()
    assert next_of(now) == "" and guide(now).finished


def served():
    RollupDay.objects.create(
        day=timezone.now().date(), pool_id=1, tenant_id=1, class_id=1, model_id=1, rate_version=1, outcome=1,
        requests=1, prompt_tokens=1, cached_tokens=0, output_tokens=1, gpu_us=1, charge_prompt_nanos=0,
        charge_cached_nanos=0, charge_output_nanos=0, charge_gpu_nanos=0, stages=b"",
    )  # fmt: skip


@pytest.mark.parametrize("role,tenants,begins", [("admin", 0, "/setup/"), ("admin", 1, "/"), ("viewer", 0, "/")])
def test_an_administrator_of_nothing_begins_there(role, tenants, begins, installation):
    if tenants:
        factories.tenant("acme")
    client = factories.person(role)
    assert client.get("/start/").url == begins


def test_what_a_role_may_not_make_has_no_button(people):
    factories.workload_class("chat")
    assert "/classes/new/" in people["admin"].get("/setup/").content.decode()
    page = people["viewer"].get("/setup/").content.decode()
    assert "/classes/new/" not in page and "A class of work" in page
    assert people["tenant"].get("/setup/").status_code == 403


def test_other_pages_lead_back_until_the_first_request(people):
    client = people["admin"]
    assert "Back to the steps" not in client.get("/tenants/").content.decode()
    client.get("/setup/")
    assert client.session[SETTING_UP] and "Back to the steps" in client.get("/tenants/").content.decode()
    served()
    assert "the installation works" in client.get("/setup/").content.decode()
    assert "Back to the steps" not in client.get("/tenants/").content.decode()


def test_the_guides_queries_do_not_grow(people, django_assert_num_queries):
    client = people["admin"]
    client.get("/setup/")
    with django_assert_num_queries(QUERIES):
        client.get("/setup/")
    for number in range(20):
        factories.tenant(f"t{number}")
        factories.workload_class(f"c{number}")
    with django_assert_num_queries(QUERIES):
        client.get("/setup/")


QUERIES = 22
