"""What is remembered of a draft is what compiling it again says, whatever is saved in between and whenever."""

from datetime import timedelta

import pytest

from controlplane.audit.actors import Actor
from controlplane.budgets.models import Budget
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.fleet.models import Pool, ServedModel, Slot
from controlplane.ledger.models import RateCard
from controlplane.policy import drafts
from controlplane.policy.actions import push
from controlplane.policy.compile import compile_source, load_source
from controlplane.policy.diff import diff
from controlplane.policy.queries import configuration_of, latest_revision
from controlplane.tenants.models import Tenant
from tests import factories

pytestmark = pytest.mark.django_db

EDITS = {
    "a tenant's weight": lambda: Tenant.objects.update(weight=7),
    "a tenant's classes": lambda: Tenant.objects.update(classes=[]),
    "a tenant's parent": lambda: Tenant.objects.update(parent=factories.tenant("above")),
    "a new tenant": lambda: factories.tenant("late", classes=["chat"]),
    "an archived tenant": lambda: Tenant.objects.update(state=Tenant.State.ARCHIVED),
    "a pool's threshold": lambda: Pool.objects.update(lend_p95_ms=77),
    "a pool's model": lambda: ServedModel.objects.update(name="another"),
    "a slot's band": lambda: Slot.objects.filter(band="flex").update(band="batch"),
    "a class's queue": lambda: WorkloadClass.objects.update(max_queue=3),
    "a contract's owner": lambda: Contract.objects.update(tenant=factories.tenant("owner", classes=["chat"])),
    "a version's threshold": lambda: ContractVersion.objects.update(threshold_ms=1_234),
    "a price": lambda: RateCard.objects.update(prompt_nanos_per_mtok=5),
    "a hard budget": lambda: Budget.objects.update(hard=True),
}


@pytest.fixture
def pushed(fleet, now):
    contract = Contract.objects.create(slug="chat-ttft", name="x", workload_class=fleet.classes[0], created_at=now)
    for number, days in ((1, -30), (2, 5)):
        ContractVersion.objects.create(
            contract=contract, number=number, effective_from=now + timedelta(days=days), target_ppm=990_000,
            threshold_ms=1_000 - number, created_by="test", created_at=now,
        )  # fmt: skip
    Budget.objects.create(tenant=fleet.tenant, name="month", limit_nanos=1, hard=False, created_at=now, updated_at=now)
    push(actor=Actor.system("test"), reason="first", now=now)
    return latest_revision()


def afresh(against, now):
    """What nothing remembers: compiled and compared in full."""
    configuration = compile_source(load_source(now))
    return configuration.digest, diff(configuration_of(against.number), configuration, now=now)


def said(against, now):
    found = drafts.compared(load_source(now), against, now)
    return found.digest, found.changes


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_every_change_is_seen_and_seen_again(pushed, now, edit):
    assert said(pushed, now) == (pushed.digest, [])
    edit()
    found = said(pushed, now)
    assert found == afresh(pushed, now) and found[0] != pushed.digest, "the edit changes the policy"
    assert said(pushed, now) == found


def test_the_same_rows_are_compiled_once(pushed, now):
    one, other = (drafts.compared(load_source(at), pushed, at) for at in (now, now + timedelta(minutes=1)))
    assert one is other
    assert drafts.compared(load_source(now), None, now).changes, "against nothing everything is new"


def test_what_begins_later_is_compared_again_when_it_has_begun(pushed, now):
    Contract.objects.update(slug="chat-new")
    ContractVersion.objects.filter(number=1).delete()
    ContractVersion.objects.create(
        contract=Contract.objects.get(), number=3, effective_from=now + timedelta(days=1), target_ppm=990_000,
        threshold_ms=5, created_by="test", created_at=now,
    )  # fmt: skip
    later = now + timedelta(days=2)
    assert said(pushed, now) == afresh(pushed, now)
    assert said(pushed, later) == afresh(pushed, later)
    assert said(pushed, now)[1] != said(pushed, later)[1], "it is in force at once by then"


def test_few_drafts_are_kept(pushed, now):
    for weight in range(3 * drafts.KEPT_MOST):
        Tenant.objects.update(weight=weight + 1)
        said(pushed, now)
    assert len(drafts._kept) == drafts.KEPT_MOST
