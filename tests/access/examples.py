"""Objects for the arguments of addresses, so that the matrix can open every page.

An app adds a line to ARGUMENTS: the beginning of the address (the longest one that fits counts), the argument, and a
function that makes the object of a tenant (`acme`, whose member is the role `tenant`, or `stranger`) and returns the
argument's value. Objects that belong to no tenant ignore it. Texts of a stranger's object should hold MARK[owner]: the
matrix looks for it where it must not appear. A function may make its object more than once: use get_or_create.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.access.models import Invitation, PersonalToken, Session
from controlplane.access.queries import hashed
from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.budgets import actions as budget_actions
from controlplane.budgets.increases import add_increase
from controlplane.budgets.models import Budget, BudgetIncrease
from controlplane.contracts.actions import create_contract
from controlplane.contracts.models import Contract
from controlplane.core.reasons import Reason
from controlplane.fleet.actions import create_enrolment_token, request_drain
from controlplane.flex.models import Decision, Lend
from controlplane.jobs.models import Batch, Job, StoredFile
from controlplane.jobs.storage import Writing
from controlplane.ledger import rates
from controlplane.ledger.models import AttributionInterval, ExportJob, Invoice, InvoiceUpload, Proposal
from controlplane.policy.compile import compile_configuration
from controlplane.policy.models import Revision, Rollout
from controlplane.tenants import key_actions
from controlplane.tenants.models import ApiKey, Member, Tenant
from controlplane.usage.models import DecisionSample
from tests import factories
from tests.access.alert_examples import alert, delivery, receiver, silence
from tests.access.lab_examples import experiment, experiment_kind, share_token
from tests.flex.conftest import make_band

MARK = {"acme": "acme-own-mark", "stranger": "stranger-only-mark"}
ACTOR = Actor(id=None, name="ada", role="admin")
Maker = Callable[[str], Any]


def tenant(owner: str) -> str:
    Tenant.objects.filter(slug=owner).update(name=f"Name {MARK[owner]}", classes=["chat"])
    return owner


def key(owner: str) -> str:
    row = Tenant.objects.get(slug=tenant(owner))
    found = ApiKey.objects.filter(tenant=row).first()
    if found is None:
        found = key_actions.create_key(
            tenant_id=row.pk, name=f"key {MARK[owner]}", classes=["chat"], default_class="chat", actor=ACTOR,
            now=factories.NOW,
        ).key  # fmt: skip
    return found.public_id


def budget(owner: str) -> int:
    row = Tenant.objects.get(slug=owner)
    found = Budget.objects.filter(tenant=row).first() or budget_actions.create_budget(
        tenant_id=row.pk, name=f"budget {MARK[owner]}", limit_nanos=5_000_000_000, reason=f"plan {MARK[owner]}",
        actor=ACTOR, now=factories.NOW,
    )  # fmt: skip
    return found.pk


def increase(owner: str) -> int:
    found = BudgetIncrease.objects.filter(budget_id=budget(owner)).first() or add_increase(
        budget_id=budget(owner), amount_nanos=1_000_000_000, ends_at=timezone.now() + timedelta(days=1),
        reason=f"launch {MARK[owner]}", actor=ACTOR, now=timezone.now(),
    )  # fmt: skip
    return found.pk


def member(owner: str) -> int:
    return Member.objects.get(user__username="viewer").pk


def entry(owner: str) -> int:
    key(owner)
    return AuditEntry.objects.filter(tenant_slug=owner).latest("id").pk


def pool(owner: str) -> str:
    """A pool with agents, slots of every band, and a controller that has ticked: so there is a decision."""
    found = factories.Pool.objects.first()
    if found is None:
        band = make_band(factories.NOW)
        band.step(2)
        found = band.pool
    return found.slug


def workload_class(owner: str) -> str:
    pool(owner)
    return "chat"


def flex_slot(owner: str) -> int:
    return factories.Slot.objects.filter(pool__slug=pool(owner), band="flex").latest("pk").pk


def act_entry(owner: str) -> int:
    row = request_drain(agent_id=agent(owner), actor=ACTOR, now=factories.NOW, reason="example")
    return AuditEntry.objects.filter(action="agent.drain", object_id=str(row.pk)).latest("pk").pk


def loan(owner: str) -> int:
    row, _ = Lend.objects.get_or_create(
        slot_id=flex_slot(owner),
        fence=1,
        defaults={
            "pool_id": Decision.objects.get(pk=decision(owner)).pool_id,
            "lent_at": timezone.now(),
            "lend_decision_id": decision(owner),
        },
    )
    return row.pk


def slot(owner: str) -> int:
    row = factories.Pool.objects.get(slug=pool(owner))
    return (row.slots.first() or factories.slot(row, "i1", "interactive")).pk


def agent(owner: str) -> int:
    row = factories.Pool.objects.get(slug=pool(owner))
    return (row.agents.first() or factories.agent(row)).pk


def enrolment_token(owner: str) -> int:
    row = factories.Pool.objects.get(slug=pool(owner))
    token = row.enrolment_tokens.first() or create_enrolment_token(pool=row, actor=ACTOR, now=factories.NOW)[0]
    return token.pk


def contract(owner: str) -> str:
    slug = f"{owner}-promise"
    if not Contract.objects.filter(slug=slug).exists():
        create_contract(
            slug=slug, name=f"Promise {MARK[owner]}", class_slug=workload_class(owner), tenant_slug=owner,
            values={"target_ppm": 990_000, "threshold_ms": 700}, actor=ACTOR, now=factories.NOW,
        )  # fmt: skip
    return slug


def served_model(owner: str) -> int:
    return factories.Pool.objects.get(slug=pool(owner)).model_id


def cost_rate(owner: str) -> int:
    row = factories.Pool.objects.get(slug=pool(owner))
    found = row.cost_rates.first() or rates.add_cost_rate(
        pool_slug=row.slug, nanos_per_slot_hour=2_500_000_000, actor=ACTOR, now=factories.NOW, reason="first"
    )
    return found.pk


def rate_card(owner: str) -> int:
    row = factories.Pool.objects.get(slug=pool(owner))
    found = row.model.rate_cards.first() or rates.add_rate_card(
        class_slug="chat", model=row.model.name, actor=ACTOR, now=factories.NOW, reason="first",
        values={"prompt_nanos_per_mtok": 1, "output_nanos_per_mtok": 2},
    )  # fmt: skip
    return found.pk


def job(owner: str) -> UUID:
    found = Job.objects.filter(tenant__slug=owner).first()
    if found is None:
        bulk = factories.WorkloadClass.objects.filter(kind="batch").first() or factories.workload_class("bulk", "batch")
        found = Job.objects.create(
            tenant=Tenant.objects.get(slug=owner), workload_class=bulk,
            pool=factories.Pool.objects.get(slug=pool(owner)), name=f"job {MARK[owner]}", items=10, prompt_tokens=10,
            expected_output_tokens=10, created_by="key", created_at=factories.NOW,
        )  # fmt: skip
    return found.uuid


def stored_file(owner: str) -> str:
    row, _ = StoredFile.objects.get_or_create(
        path=f"example {owner}",
        defaults={
            "tenant": Tenant.objects.get(slug=owner), "purpose": "batch", "filename": f"file {MARK[owner]}", "lines": 1,
            "created_by": "key", "created_at": factories.NOW, "ready_at": factories.NOW,
            "expires_at": timezone.now() + timedelta(days=1),
        },
    )  # fmt: skip
    return f"file-{row.uuid.hex}"


def batch(owner: str) -> str:
    stored_file(owner)
    file = StoredFile.objects.get(path=f"example {owner}")
    row, _ = Batch.objects.get_or_create(
        input_file=file,
        defaults={
            "tenant": file.tenant, "class_slug": "bulk", "endpoint": "/v1/chat/completions", "completion_window": "24h",
            "metadata": {"name": MARK[owner]}, "created_by": "key", "created_at": factories.NOW,
            "expires_at": timezone.now() + timedelta(days=1),
        },
    )  # fmt: skip
    return f"batch_{row.uuid.hex}"


def upload(owner: str) -> UUID:
    """A batch without a job: a file that is being checked."""
    return UUID(batch(owner).removeprefix("batch_"))


def results(owner: str) -> str:
    """The job came from a file, and its results are stored."""
    row = Job.objects.get(uuid=job(owner))
    path = f"example results {owner}"
    if not StoredFile.objects.filter(path=path).exists():
        with Writing(path) as writing:
            writing.write(f'{{"custom_id": "{MARK[owner]}"}}\n'.encode())
            written = writing.finish()
        file = StoredFile.objects.create(
            tenant=row.tenant, purpose="batch_output", filename=f"results {MARK[owner]}", path=path,
            size_bytes=written.size_bytes, lines=written.lines, created_by="key", created_at=factories.NOW,
            ready_at=factories.NOW, expires_at=timezone.now() + timedelta(days=1),
        )  # fmt: skip
        Batch.objects.create(
            tenant=row.tenant, job=row, input_file=file, output_file=file, class_slug="bulk", state="completed",
            endpoint="/v1/chat/completions", completion_window="24h", metadata={"name": MARK[owner]}, created_by="key",
            created_at=factories.NOW, expires_at=timezone.now() + timedelta(days=1),
        )  # fmt: skip
    return "results"


def revision(owner: str) -> int:
    pool(owner)
    found = Revision.objects.first() or Revision.objects.create(
        created_at=factories.NOW, created_by="ada", reason="first", digest="0" * 64,
        configuration=compile_configuration(factories.NOW).to_json(), not_before=factories.NOW,
        accept_until=factories.NOW,
    )  # fmt: skip
    return found.pk


def rollout(owner: str) -> int:
    number = revision(owner)
    if not Rollout.objects.filter(revision_id=number).exists():
        Rollout.objects.create(revision_id=number, requested_at=factories.NOW, requested_by="ada")
    return number


def request_id(owner: str) -> UUID:
    found, _ = DecisionSample.objects.get_or_create(
        request_id=uuid5(NAMESPACE_URL, owner),
        defaults={
            "at": timezone.now(), "agent_id": agent(owner), "pool_id": factories.Pool.objects.get(slug=pool(owner)).pk,
            "tenant_id": Tenant.objects.get(slug=owner).pk, "key_id": 0, "class_id": 0, "decision": "reject",
            "reason": Reason.RATE_LIMIT.code, "checks": [],
        },
    )  # fmt: skip
    return found.request_id


def interval(owner: str) -> int:
    row = factories.Pool.objects.get(slug=pool(owner))
    found, _ = AttributionInterval.objects.get_or_create(
        pool=row, starts_at=factories.NOW,
        defaults={"ends_at": factories.NOW + timedelta(hours=1), "method": "test", "attributed_at": factories.NOW},
    )  # fmt: skip
    return found.pk


def month(owner: str) -> str:
    return "2026-10"


def file_format(owner: str) -> str:
    return "csv"


def export_job(owner: str) -> int:
    found, _ = ExportJob.objects.get_or_create(
        period="2026-10", format="csv", defaults={"asked_at": factories.NOW, "asked_by": "ada"}
    )
    return found.pk


def invoice(owner: str) -> int:
    found, _ = Invoice.objects.get_or_create(
        file_sha256="0" * 64, period="2026-09",
        defaults={
            "file_name": "september.csv", "format": "focus", "currency": "EUR", "lines_count": 0,
            "imported_at": factories.NOW, "imported_by": "ada",
        },
    )  # fmt: skip
    return found.pk


def invoice_upload(owner: str) -> UUID:
    found = InvoiceUpload.objects.first() or InvoiceUpload.objects.create(
        period="2026-10", file_name="october.csv", size_bytes=80, uploaded_at=timezone.now(), uploaded_by="ada",
        content=b"BilledCost,BillingCurrency,ChargePeriodStart\n1.5,EUR,2026-10-02T00:00:00Z\n",
    )  # fmt: skip
    return found.pk


def proposal(owner: str) -> int:
    found, _ = Proposal.objects.get_or_create(
        event_key=f"credit_note:{owner}",
        defaults={
            "kind": "credit_note", "period": "2026-10", "tenant_slug": owner, "amount_nanos": 1,
            "lines": [{"debit": "revenue:chat", "credit": f"billed:{owner}:chat", "nanos": 1}],
            "reason": f"note {MARK[owner]}", "made_at": factories.NOW, "made_by": "ada",
        },
    )  # fmt: skip
    return found.pk


def decision(owner: str) -> int:
    return Decision.objects.filter(pool__slug=pool(owner)).latest("pk").pk


def invitation_secret(owner: str) -> str:
    invitation(owner)
    return f"secret of {owner}"


def invitation(owner: str) -> int:
    found, _ = Invitation.objects.get_or_create(
        email=f"{owner}@example.com",
        defaults={
            "role": "viewer", "secret_hash": hashed(f"secret of {owner}"), "created_at": factories.NOW,
            "created_by": "ada", "expires_at": timezone.now() + timedelta(days=1),
        },
    )  # fmt: skip
    return found.pk


def personal_token(owner: str) -> int:
    found, _ = PersonalToken.objects.get_or_create(
        name="example", user=User.objects.get(username="viewer"),
        defaults={
            "prefix": "fbp_example", "secret_hash": hashed("example"), "permissions": ["own.read"],
            "created_at": factories.NOW, "expires_at": timezone.now() + timedelta(days=1),
        },
    )  # fmt: skip
    return found.pk


def session_id(owner: str) -> UUID:
    return Session.objects.filter(user__username="viewer").latest("last_used_at").public_id


def passkey(owner: str) -> int:
    return 1


ARGUMENTS: dict[tuple[str, str], Maker] = {
    ("lab/", "pk"): experiment,
    ("lab/", "token"): share_token,
    ("lab/", "kind"): experiment_kind,
    ("api/v1/lab/experiments/", "pk"): experiment,
    ("alerts/", "alert_id"): alert,
    ("alerts/silences/", "silence_id"): silence,
    ("alerts/receivers/", "receiver_id"): receiver,
    ("alerts/deliveries/", "delivery_id"): delivery,
    ("api/v1/alerts/", "alert_id"): alert,
    ("api/v1/silences/", "pk"): silence,
    ("finance/statements/", "slug"): tenant,
    ("finance/intervals/", "pk"): interval,
    ("finance/reconciliation/", "period"): month,
    ("finance/periods/", "period"): month,
    ("finance/periods/", "format"): file_format,
    ("finance/exports/", "pk"): export_job,
    ("finance/proposals/", "pk"): proposal,
    ("finance/skus/", "slug"): pool,
    ("finance/invoices/", "pk"): invoice,
    ("finance/invoices/uploads/", "upload_id"): invoice_upload,
    ("api/v1/invoices/", "pk"): invoice,
    ("api/v1/periods/", "period"): month,
    ("api/v1/periods/", "file_format"): file_format,
    ("api/v1/proposals/", "pk"): proposal,
    ("api/v1/reconciliations/", "period"): month,
    ("requests/", "request_id"): request_id,
    ("api/v1/requests/", "request_id"): request_id,
    ("policy/revisions/", "number"): rollout,
    ("policy/revisions/", "pool"): pool,
    ("policy/rollouts/", "number"): rollout,
    ("flex/slots/", "slot_id"): flex_slot,
    ("acts/", "entry_id"): act_entry,
    ("acts/drain/", "agent_id"): agent,
    ("acts/undrain/", "agent_id"): agent,
    ("acts/suspend/", "slug"): tenant,
    ("acts/resume/", "slug"): tenant,
    ("flex/decisions/", "decision_id"): decision,
    ("api/v1/policy/revisions/", "number"): rollout,
    ("api/v1/policy/revisions/", "pool"): pool,
    ("api/v1/flex/decisions/", "pk"): decision,
    ("api/v1/flex/slots/", "pk"): flex_slot,
    ("api/v1/flex/loans/", "pk"): loan,
    ("api/v1/flex/pools/", "slug"): pool,
    ("pools/", "slot_id"): slot,
    ("agents/", "agent_id"): agent,
    ("contracts/", "slug"): contract,
    ("rates/cost/", "slug"): pool,
    ("rates/cards/", "class_slug"): workload_class,
    ("rates/cards/", "model_id"): served_model,
    ("jobs/", "job_uuid"): job,
    ("jobs/", "which"): results,
    ("jobs/uploads/", "batch_uuid"): upload,
    ("api/v1/slots/", "pk"): slot,
    ("api/v1/agents/", "pk"): agent,
    ("api/v1/enrolment-tokens/", "pk"): enrolment_token,
    ("api/v1/contracts/", "slug"): contract,
    ("api/v1/cost-rates/", "pk"): cost_rate,
    ("api/v1/rate-cards/", "pk"): rate_card,
    ("api/v1/jobs/", "uuid"): job,
    ("v1/files/", "file_id"): stored_file,
    ("v1/batches/", "batch_id"): batch,
    ("tenants/", "slug"): tenant,
    ("keys/", "public_id"): key,
    ("budgets/", "budget_id"): budget,
    ("budgets/", "increase_id"): increase,
    ("settings/members/", "member_id"): member,
    ("settings/members/", "public_id"): session_id,
    ("settings/members/", "token_id"): personal_token,
    ("settings/invitations/", "invitation_id"): invitation,
    ("invitation/", "secret"): invitation_secret,
    ("account/sessions/", "public_id"): session_id,
    ("account/tokens/", "token_id"): personal_token,
    ("account/passkeys/", "pk"): passkey,
    ("audit/", "entry_id"): entry,
    ("pools/", "slug"): pool,
    ("classes/", "slug"): workload_class,
    ("api/v1/tenants/", "slug"): tenant,
    ("api/v1/api-keys/", "public_id"): key,
    ("api/v1/budgets/", "pk"): budget,
    ("api/v1/members/", "pk"): member,
    ("api/v1/second-factors/", "pk"): member,
    ("api/v1/sessions/", "public_id"): session_id,
    ("api/v1/invitations/", "pk"): invitation,
    ("api/v1/personal-tokens/", "pk"): personal_token,
    ("api/v1/audit/", "pk"): entry,
    ("api/v1/pools/", "slug"): pool,
    ("api/v1/classes/", "slug"): workload_class,
}

# Objects that belong to one tenant: another tenant's member gets 404. The beginnings of their addresses.
OWNED = (
    "tenants/", "keys/", "budgets/", "contracts/", "jobs/", "requests/", "finance/statements/", "api/v1/tenants/",
    "api/v1/api-keys/", "api/v1/budgets/", "api/v1/contracts/", "api/v1/jobs/", "api/v1/requests/",
)  # fmt: skip


def maker(path: str, argument: str) -> Maker | None:
    """The function for an argument of an address, by the longest beginning that fits."""
    plain = path.replace("^", "")
    fitting = [key for key in ARGUMENTS if plain.startswith(key[0]) and key[1] == argument]
    return ARGUMENTS[max(fitting, key=lambda found: len(found[0]))] if fitting else None
