"""In which revision a change went out: read from how far each push carried the log, exact with writers at work."""

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.audit.models import AuditEntry, CarriedRevision
from controlplane.audit.queries import AuditFilter, entries, verify_chain, waits_for_push, with_revision
from controlplane.policy.actions import push, rollback
from controlplane.policy.models import Revision
from controlplane.tenants.actions import edit_tenant, resume_tenant, suspend_tenant
from controlplane.tenants.models import Tenant
from tests.policy.conftest import ADMIN, make_fleet, no_broker, signing_keys
from tests.threads import at_once

__all__ = ["no_broker", "signing_keys"]


def weigh(weight: int) -> None:
    row = Tenant.objects.get(slug="acme")
    edit_tenant(
        tenant_id=row.pk, version=row.version, changes={"weight": weight}, actor=ADMIN, now=timezone.now(), reason="w"
    )


def went_out() -> list[tuple[str, str | None]]:
    return list(with_revision(AuditEntry.objects.order_by("id")).values_list("action", "went_out"))


@pytest.mark.django_db
def test_each_change_names_the_push_that_carried_it(no_broker):
    make_fleet(1)
    weigh(2)
    first = push(actor=ADMIN, reason="x", now=timezone.now()).number
    weigh(3)
    tenant = Tenant.objects.get(slug="acme").pk
    suspend_tenant(tenant_id=tenant, reason="x", actor=ADMIN, now=timezone.now())
    resume_tenant(tenant_id=tenant, reason="x", actor=ADMIN, now=timezone.now())
    weigh(4)
    second = push(actor=ADMIN, reason="y", now=timezone.now()).number
    weigh(5)
    back = rollback(to_number=first, actor=ADMIN, reason="z", now=timezone.now()).number
    assert went_out() == [
        ("tenant.edit", str(first)), ("policy.push", str(first)), ("tenant.edit", str(second)),
        ("tenant.suspend", None),
        ("tenant.resume", None), ("tenant.edit", str(second)), ("policy.push", str(second)), ("tenant.edit", None),
        ("policy.rollback", str(back)),
    ]  # fmt: skip
    found = entries(AuditFilter(revision=second)).order_by("id").values_list("action", flat=True)
    assert list(found) == ["tenant.edit", "tenant.edit", "policy.push"]
    waiting = [entry.action for entry in with_revision(AuditEntry.objects.all()) if waits_for_push(entry)]
    assert waiting == ["tenant.edit"]


@pytest.mark.django_db
def test_page_rest_and_export_tell_it_and_filter_by_it(people, no_broker):
    make_fleet(1)
    weigh(2)
    number = push(actor=ADMIN, reason="x", now=timezone.now()).number
    weigh(3)
    client = people["viewer"]
    page = client.get(f"/audit/?revision={number}").content.decode()
    assert f'<a href="/policy/revisions/{number}/">{number}</a>' in page
    assert "not pushed" not in page
    assert "not pushed" in client.get("/audit/").content.decode()
    assert client.get("/audit/?revision=x").status_code == 400
    rows = client.get(f"/api/v1/audit/?revision={number}").json()["results"]
    assert {row["revision"] for row in rows} == {str(number)}
    csv = b"".join(client.get("/audit/?format=csv").streaming_content).decode()
    assert csv.splitlines()[0].endswith("request_id,revision")


@pytest.mark.django_db(transaction=True)
def test_with_writers_at_work_no_change_is_told_to_have_gone_out_that_did_not(no_broker):
    """Each push carries exactly the changes whose entries lie before its mark."""
    make_fleet(1)
    at_once([*(lambda weight=weight: patiently(weight) for weight in range(2, 10)), *[push_now] * 4], within_s=60)
    for carried in CarriedRevision.objects.all():
        document = Revision.objects.get(pk=carried.revision).configuration["pools"]["chat-70b"]
        weight = next(row["weight"] for row in document["tenants"] if row["slug"] == "acme")
        last = AuditEntry.objects.filter(action="tenant.edit", pk__lte=carried.through_id).order_by("-pk").first()
        assert weight == (last.after["weight"] if last else 1)


def push_now() -> None:
    push(actor=ADMIN, reason="x", now=timezone.now())


def patiently(weight: int) -> None:
    from controlplane.tenants.actions import Stale

    for _ in range(20):
        try:
            weigh(weight)
            return
        except Stale:
            continue


@pytest.mark.django_db
def test_a_noted_hash_shows_whether_the_end_of_the_log_is_still_there(capsys, no_broker):
    make_fleet(1)
    weigh(2)
    weigh(3)
    noted = verify_chain()
    call_command("audit", "verify", anchor=noted.last_hash)
    assert noted.last_hash in capsys.readouterr().out
    with pytest.raises(CommandError, match="are gone"):
        call_command("audit", "verify", anchor="ab" * 32)
