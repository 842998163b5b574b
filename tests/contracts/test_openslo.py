"""Contracts go out as OpenSLO and come back the same; what cannot be carried is named, and nothing is half imported."""

from datetime import time, timedelta

import pytest
import yaml
from django.core.files.uploadedfile import SimpleUploadedFile
from hypothesis import given
from hypothesis import strategies as st

from controlplane.audit.actors import Actor
from controlplane.contracts import openslo, openslo_import
from controlplane.contracts.actions import create_class, create_contract
from controlplane.contracts.models import Contract, ContractVersion, WorkloadClass
from controlplane.tenants.models import Tenant

ADA = Actor(id=None, name="ada", role="admin")
CLASS = WorkloadClass(slug="chat", kind="interactive")

latency = st.fixed_dictionaries(
    {
        "objective": st.just("latency"),
        "target_ppm": st.integers(1, 999_999),
        "population": st.sampled_from(ContractVersion.Population.values),
        "metric": st.sampled_from(ContractVersion.Metric.values),
        "threshold_ms": st.integers(1, 2**31 - 1),
        "window_s": st.integers(1, 43_200).map(lambda minutes: minutes * 60),
        "budget_period_s": st.integers(1, 129_600).map(lambda minutes: minutes * 60),
        "min_events": st.integers(1, 10**6),
    },
    optional={"load_limit_per_s": st.floats(0.001, 1e6)},
)
nights = st.fixed_dictionaries(
    {
        "objective": st.just("deadline"),
        "target_ppm": st.integers(1, 999_999),
        "population": st.sampled_from(ContractVersion.Population.values),
        "admitted_before": st.times().map(lambda at: time(at.hour, at.minute)),
        "finished_by": st.times().map(lambda at: time(at.hour, at.minute)),
        "zone": st.sampled_from(["UTC", "Europe/Berlin"]),
        "budget_period_s": st.integers(1, 129_600).map(lambda minutes: minutes * 60),
    },
    optional={"first_attempt_within_s": st.integers(60, 10**6)},
)


@given(values=st.one_of(latency, nights), tenant=st.sampled_from([None, "acme"]))
def test_what_goes_out_comes_back_the_same(values, tenant):
    contract = Contract(
        slug="chat-ttft", name="Chat: first token", workload_class=CLASS, tenant=tenant and Tenant(slug=tenant)
    )
    text = openslo.text_of([openslo.document(contract, ContractVersion(**values))])
    (found,) = openslo.read(text)
    assert (found.problems, found.left_out) == ([], [])
    assert (found.slug, found.name, found.class_slug, found.tenant_slug) == (
        "chat-ttft", "Chat: first token", "chat", tenant or "",
    )  # fmt: skip
    assert found.values == values


def good(**changes) -> dict:
    document = openslo.document(
        Contract(slug="chat-ttft", name="Chat", workload_class=CLASS),
        ContractVersion(objective="latency", target_ppm=990_000, threshold_ms=700),
    )
    document["spec"] |= changes.pop("spec", {})
    return document | changes


def source(**spec) -> dict:
    body = {"metric": "ttft", "unit": "ms", "class": "chat", **spec}
    return {"indicator": {"spec": {"thresholdMetric": {"metricSource": {"type": "flexband", "spec": body}}}}}


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        (good(kind="AlertPolicy"), "Kind AlertPolicy is not imported"),
        (good(apiVersion="openslo/v2alpha"), "is not openslo/v1"),
        (good(spec={"budgetingMethod": "Timeslices"}), "not slices of time"),
        (good(spec={"timeWindow": [{"duration": "1M", "isRolling": True}]}), "is no duration"),
        (good(spec={"timeWindow": [{"duration": "4w", "isRolling": False}]}), "calendar windows cannot be carried"),
        (good(spec={"timeWindow": []}), "exactly one window"),
        (good(spec={"objectives": [{"target": 0.9}, {"target": 0.99}]}), "has exactly one"),
        (good(spec={"objectives": [{"target": 1.0, "value": 7}]}), "between 0 and 1"),
        (good(spec={"objectives": [{"target": 0.99999999, "value": 7}]}), "steps of a millionth"),
        (good(spec={"objectives": [{"target": float("nan"), "value": 7}]}), "between 0 and 1"),
        (good(spec={"objectives": [{"target": 0.9, "value": 0.7}]}), "whole milliseconds"),
        (good(spec={"objectives": [{"target": 0.9, "value": 7, "op": "gte"}]}), "op gte cannot be carried"),
        (good(spec={"objectives": [{"target": 0.9, "value": 7, "timeSliceTarget": 0.9}]}), "timeSliceTarget"),
        (good(spec={"indicatorRef": "other"}), "write the indicator inside"),
        (good(spec={"indicator": {"spec": {"ratioMetric": {}}}}), "no thresholdMetric"),
        (good(spec=source(metric="p99")), "metric p99 is none of"),
        (good(spec=source(unit="s")), "unit: ms"),
        (good(spec=source(window="15 minutes")), "is no duration"),
        (good(spec=source(minEvents="many")), "must be a whole number"),
        (good(spec=source(metric="deadline", finishedBy=360)), "in quotes"),
        ("just text", "It is no mapping"),
    ],
)
def test_what_cannot_be_carried_is_a_problem_that_says_what_to_write(document, problem):
    (found,) = openslo.read(openslo.text_of([document]) if isinstance(document, dict) else yaml.safe_dump(document))
    assert any(problem in text for text in found.problems), found.problems


def test_what_is_only_left_out_is_listed():
    document = good()
    document["metadata"] |= {"labels": {"team": "a"}}
    document["spec"] |= {"description": "x", "alertPolicies": [{"kind": "AlertPolicy"}]}
    (found,) = openslo.read(openslo.text_of([document]))
    assert found.problems == []
    assert [text.split(":")[0] for text in found.left_out] == ["alertPolicies", "metadata.labels", "description"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "no YAML in line"),
        ("", "no document"),
        ("a: &x [1]\nb: *x", "uses aliases"),
        ("!!python/object/apply:os.system ['true']", "no YAML"),
        ("---\n1\n" * 201, "at most 200"),
        ("x: " + "a" * openslo.TEXT_BYTES_MAX, "more than 256 KiB"),
        ("[" * 20_000, "no YAML"),
    ],
)
def test_what_is_no_text_of_documents_is_refused_whole(text, said):
    with pytest.raises(openslo.Unreadable, match=said):
        openslo.read(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=8),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "apiVersion",
                        "kind",
                        "metadata",
                        "spec",
                        "indicator",
                        "objectives",
                        "timeWindow",
                        "name",
                        "target",
                    ]
                ),
                x,
                max_size=5,
            )
        ),
        max_leaves=12,
    )
)
def test_any_document_is_read_or_refused_and_never_fails(document):
    try:
        found = openslo.read(yaml.safe_dump({"apiVersion": "openslo/v1", "kind": "SLO", "spec": document}))
    except openslo.Unreadable:
        return
    assert found[0].problems


@pytest.fixture
def chat(installation, now):
    return create_class(slug="chat", kind="interactive", values={}, actor=ADA, now=now)


def texts(*documents) -> str:
    return openslo.text_of(documents)


@pytest.mark.django_db
def test_an_import_creates_versions_or_leaves_alone_and_takes_all_or_nothing(chat, now):
    found = openslo.read(texts(good()))
    (outcome,) = openslo_import.rehearse(found, actor=ADA, now=now)
    assert outcome.does == "create"
    assert Contract.objects.count() == 0, "a rehearsal leaves nothing"
    openslo_import.take(found, actor=ADA, now=now, reason="from git")
    assert ContractVersion.objects.get().threshold_ms == 700
    later = now + timedelta(hours=1)
    assert [one.does for one in openslo_import.rehearse(found, actor=ADA, now=later)] == ["same"]
    changed = good(spec={"objectives": [{"target": 0.99, "value": 900}]})
    other = good() | {"metadata": {"name": "other"}}
    broken = good(spec=source(**{"class": "nobody"})) | {"metadata": {"name": "broken"}}
    with pytest.raises(openslo_import.Refused) as refused:
        openslo_import.take(openslo.read(texts(changed, other, broken)), actor=ADA, now=later, reason="x")
    assert [one.does for one in refused.value.outcomes] == ["version", "create", "refused"]
    assert "There is no class 'nobody' in use" in refused.value.outcomes[2].reasons[0]
    assert ContractVersion.objects.count() == 1
    openslo_import.take(openslo.read(texts(changed, other)), actor=ADA, now=later, reason="x")
    assert ContractVersion.objects.filter(contract__slug="chat-ttft").count() == 2


@pytest.mark.django_db
def test_a_name_that_is_another_classes_contract_is_refused(chat, now):
    create_class(slug="agents", kind="interactive", values={}, actor=ADA, now=now)
    create_contract(
        slug="chat-ttft", class_slug="agents", values={"target_ppm": 990_000, "threshold_ms": 7}, actor=ADA, now=now
    )
    (outcome,) = openslo_import.rehearse(openslo.read(texts(good())), actor=ADA, now=now)
    assert outcome.does == "refused"
    assert "exists for class agents" in outcome.reasons[0]


@pytest.mark.django_db
def test_an_admin_looks_first_then_imports_and_downloads_the_same(people, chat):
    text = texts(good())
    page = people["admin"].post("/contracts/openslo/import/", {"file": SimpleUploadedFile("a.yaml", text.encode())})
    assert page.status_code == 200
    assert "New contract" in page.content.decode()
    assert Contract.objects.count() == 0
    page = people["admin"].post("/contracts/openslo/import/", {"text": text, "confirm": "1"})
    assert "Say why" in page.content.decode()
    page = people["admin"].post(
        "/contracts/openslo/import/", {"text": text, "confirm": "1", "reason": "from git"}, follow=True
    )
    assert "1 of 1 changed something" in page.content.decode()
    (found,) = openslo.read(people["viewer"].get("/contracts/openslo/contracts.yaml").content.decode())
    assert found.values["threshold_ms"] == 700
    assert people["oncall"].get("/contracts/openslo/import/").status_code == 403


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "Choose a file or paste"),
        ({"text": "a: ["}, "no YAML in line"),
        ({"file": SimpleUploadedFile("a.yaml", b"\xff\xfe")}, "no UTF-8"),
        ({"file": SimpleUploadedFile("a.yaml", b"a" * 300_000)}, "more than 256 KiB"),
    ],
)
def test_a_bad_upload_says_what_is_wrong(people, chat, values, said):
    page = people["admin"].post("/contracts/openslo/import/", values)
    assert page.status_code == 422
    assert said in page.content.decode()


def test_a_tenants_member_gets_contracts_that_it_may_see_only(people, chat, now):
    own = {"target_ppm": 990_000, "threshold_ms": 700}
    for slug in ("acme", "stranger"):
        create_contract(slug=f"for-{slug}", class_slug="chat", tenant_slug=slug, values=own, actor=ADA, now=now)
    text = people["tenant"].get("/contracts/openslo/contracts.yaml").content.decode()
    assert "for-acme" in text
    assert "for-stranger" not in text
