"""Pages of classes and contracts: the way of their forms, the sentence, who sees what, statements of the lists."""

from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.contracts import actions
from controlplane.contracts.forms import ClassForm, ContractForm, class_initial, contract_initial
from controlplane.contracts.models import Contract, ContractVersion, ObjectiveMinute, WorkloadClass
from controlplane.tenants.models import Tenant
from tests import factories

ADA = Actor(id=None, name="ada", role="admin")
TTFT = {"target_ppm": 990_000, "metric": "ttft", "threshold_ms": 900, "window_s": 900, "load_limit_per_s": 18.0}


def text(response) -> str:
    return response.content.decode()


def filled(form, **changes):
    data = {name: form[name].value() for name in form.fields}
    data = {name: value for name, value in data.items() if value is not None and value is not False}
    return {**data, **changes}


@pytest.fixture
def contract(installation):
    then = timezone.now() - timedelta(days=2)
    actions.create_class(slug="chat", kind="interactive", values={"name": "Chat"}, actor=ADA, now=then)
    return actions.create_contract(slug="chat-ttft", class_slug="chat", values=TTFT, actor=ADA, now=then)


def version_data(contract, **changes):
    newest = contract.versions.order_by("-number").first()
    form = ContractForm(kind="interactive", initial={**contract_initial(newest), "version": contract.version})
    return filled(form, **changes)


def test_a_change_becomes_a_version_after_its_review(contract, people):
    address = reverse("contract-edit", args=["chat-ttft"])
    data = version_data(contract, threshold_ms=700)
    review = text(people["admin"].post(address, data))
    assert "Threshold, ms" in review and "900" in review and "Reads: At least 99" in review
    assert ContractVersion.objects.count() == 1
    saved = people["admin"].post(address, {**data, "confirm": "1", "reason": "launch"})
    assert saved.status_code == 302
    assert list(ContractVersion.objects.order_by("number").values_list("threshold_ms", flat=True)) == [900, 700]
    page = text(people["viewer"].get(reverse("contract", args=["chat-ttft"])))
    assert "launch" in page and "700" in page and "in force" in page


def test_a_target_under_which_the_fastest_page_cannot_fire_shows_the_arithmetic(contract, people):
    review = text(people["admin"].post(reverse("contract-edit", args=["chat-ttft"]), version_data(contract, target=90)))
    assert "14.4 x (1 - 0.9) = 1.44 &gt; 1" in review and "Page at burn 6 is the fastest that can" in review


def test_the_form_reads_aloud_while_it_is_typed(contract, people):
    data = version_data(contract, target="97.5", threshold_ms="650")
    heard = text(people["admin"].post(reverse("contract-reads") + "?contract=chat-ttft", data))
    assert "Burn alerts" in heard
    assert "97.5" in heard and "650" in heard and "Cannot fire" not in heard
    empty = text(people["admin"].post(reverse("contract-reads"), {}))
    assert "Fill in the promise" in empty
    assert people["viewer"].post(reverse("contract-reads"), data).status_code == 403


def test_a_tenants_member_sees_the_contracts_that_bind_it_and_no_others(contract, people):
    factories.workload_class("other")
    stranger = Tenant.objects.get(slug="stranger")
    for slug, class_slug, tenant in (("theirs", "chat", stranger.slug), ("elsewhere", "other", "")):
        actions.create_contract(
            slug=slug, class_slug=class_slug, tenant_slug=tenant, values=TTFT, actor=ADA, now=timezone.now()
        )
    page = text(people["tenant"].get(reverse("contracts")))
    assert "chat-ttft" in page and "theirs" not in page and "elsewhere" not in page
    assert people["tenant"].get(reverse("contract", args=["theirs"])).status_code == 404
    assert people["stranger"].get(reverse("contract", args=["theirs"])).status_code == 200
    assert "New contract" not in page


def test_the_record_shows_three_populations_and_leaves_out_minutes_over_the_load(contract, people):
    version = contract.versions.get()
    minute = timezone.now().replace(second=0, microsecond=0)
    counts = {"offered": 1_000, "admitted": 980, "successful": 970, "good": 965}
    ObjectiveMinute.objects.create(contract_version_id=version.pk, pool_id=1, minute=minute, **counts)
    over = {"offered": 5_000, "admitted": 5_000, "successful": 100, "good": 0}
    ObjectiveMinute.objects.create(
        contract_version_id=version.pk, pool_id=1, minute=minute - timedelta(minutes=1), **over
    )
    page = text(people["viewer"].get(reverse("contract", args=["chat-ttft"])))
    assert "96.50" in page and "98.47" in page and "99.48" in page
    assert "1 of 2 minutes were over the load range" in page


def test_the_list_of_contracts_needs_as_many_statements_for_one_as_for_nine(
    contract, people, django_assert_num_queries
):
    for number in range(8):
        actions.create_contract(slug=f"more-{number}", class_slug="chat", values=TTFT, actor=ADA, now=timezone.now())
    admin = people["admin"]
    with django_assert_num_queries(8):
        page = text(admin.get(reverse("contracts")))
    assert page.count("more-") >= 8


def test_a_class_is_made_edited_suspended_and_resumed_by_its_pages(installation, people):
    admin = people["admin"]
    data = filled(ClassForm(), slug="chat", name="Chat", kind="interactive")
    assert admin.post(reverse("class-new"), {**data, "confirm": "1", "reason": "first"}).status_code == 302
    row = WorkloadClass.objects.get()
    edit = filled(ClassForm(row=row, initial=class_initial(row)), max_queue=10)
    assert "Queue at most, requests" in text(admin.post(reverse("class-edit", args=["chat"]), edit))
    admin.post(reverse("class-edit", args=["chat"]), {**edit, "confirm": "1", "reason": "shorter queue"})
    assert WorkloadClass.objects.get().max_queue == 10
    oncall = people["oncall"]
    assert oncall.get(reverse("class-edit", args=["chat"])).status_code == 403
    assert 'data-open-dialog="suspend"' in text(oncall.get(reverse("class", args=["chat"])))
    oncall.post(reverse("class-suspend", args=["chat"]), {"reason": "runaway client"})
    assert "Suspended" in text(people["viewer"].get(reverse("classes")))
    admin.post(reverse("class-resume", args=["chat"]), {"reason": "fixed"})
    assert WorkloadClass.objects.get().state == "active"
    assert AuditEntry.objects.filter(noun="class").count() == 4
    assert people["viewer"].post(reverse("class-suspend", args=["chat"]), {"reason": "x"}).status_code == 403
    Tenant.objects.update(classes=[])
    admin.post(reverse("class-archive", args=["chat"]), {"reason": "old"})
    assert WorkloadClass.objects.get().state == "archived"
    assert oncall.post(reverse("class-resume", args=["chat"]), {"reason": "x"}).status_code == 403


def test_a_circle_of_downgrades_is_told_beside_its_field(contract, people):
    second = factories.workload_class("second", overload="downgrade", downgrade_to=WorkloadClass.objects.get())
    row = WorkloadClass.objects.get(slug="chat")
    form = ClassForm(row=row, initial=class_initial(row))
    data = filled(form, overload="downgrade", downgrade_to=second.slug)
    response = people["admin"].post(reverse("class-edit", args=["chat"]), data)
    assert response.status_code == 400
    assert 'href="#id_downgrade_to"' in text(response)


def test_the_list_of_classes_needs_as_many_statements_for_one_as_for_nine(contract, people, django_assert_num_queries):
    for number in range(8):
        factories.workload_class(f"class-{number}")
    admin = people["admin"]
    with django_assert_num_queries(8):
        page = text(admin.get(reverse("classes")))
    assert page.count("class-") >= 8


def test_a_contract_is_ended_with_a_reason(contract, people):
    admin = people["admin"]
    admin.post(reverse("contract-archive", args=["chat-ttft"]), {"reason": ""})
    assert Contract.objects.get().archived_at is None
    admin.post(reverse("contract-archive", args=["chat-ttft"]), {"reason": "over"})
    assert Contract.objects.get().archived_at is not None
    assert admin.get(reverse("contract-edit", args=["chat-ttft"])).status_code == 404
    assert "chat-ttft" in text(admin.get(reverse("contracts") + "?state=ended"))


def test_a_deadline_contract_is_made_by_its_page_and_has_no_burn_alerts(installation, people):
    then = timezone.now()
    actions.create_class(slug="bulk", kind="batch", values={}, actor=ADA, now=then)
    data = filled(
        ContractForm(new=True), slug="nightly", workload_class="bulk", objective="deadline", target="98",
        admitted_before="20:00", finished_by="06:00", zone="Europe/Berlin", first_attempt_within_min="120",
    )  # fmt: skip
    review = text(people["admin"].post(reverse("contract-new"), data))
    assert "20:00" in review and "Threshold" not in review and "14.4" not in review
    saved = people["admin"].post(reverse("contract-new"), {**data, "confirm": "1", "reason": "nights"})
    assert saved.status_code == 302, text(saved)
    page = text(people["viewer"].get(reverse("contract", args=["nightly"])))
    assert "Burn alerts" not in page and "finish by" in page
    assert people["admin"].get(reverse("contract-edit", args=["nightly"])).status_code == 200
