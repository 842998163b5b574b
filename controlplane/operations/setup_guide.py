"""From an empty installation to its first admitted request: what is there, what is missing, and where it is made."""

from dataclasses import dataclass
from datetime import datetime

from django.urls import reverse

from controlplane.budgets.models import Budget
from controlplane.contracts.models import Contract, WorkloadClass
from controlplane.fleet.models import Agent, Pool, Slot
from controlplane.fleet.queries import SILENT_AFTER
from controlplane.ledger.rate_queries import card_lines, cost_lines
from controlplane.policy.queries import latest_revision
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.usage.queries import anything_served

NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to make. `found` names what is there;"""

    name: str
    title: str
    why: str
    done: bool
    found: str
    url: str
    verb: str
    optional: bool = False
    permission: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """What the first request is made of; an empty part is shown as what to put there."""

    agent: str
    model: str
    workload_class: str


@dataclass(frozen=True, slots=True)
class Guide:
    steps: tuple[Step, ...]
    example: Example

    @property
    def needed(self) -> list[Step]:
        return [step for step in self.steps if not step.optional]

    @property
    def done(self) -> int:
        return sum(step.done for step in self.needed)

    @property
    def finished(self) -> bool:
        """Whether a request was admitted: then the installation works, whatever else is made or unmade later."""
        return self.steps[-1].done

    @property
    def next(self) -> Step | None:
        """The first step that is needed and not done."""
        return next((step for step in self.needed if not step.done), None)


def guide(now: datetime) -> Guide:
    """The steps in their order, in a fixed number of statements whatever the installation holds."""
    classes = list(
        WorkloadClass.objects.exclude(state="archived").order_by("id").values_list("slug", flat=True)[:NAMES_SHOWN]
    )
    pools = list(Pool.objects.filter(archived_at=None).select_related("model").order_by("id")[:NAMES_SHOWN])
    slots = Slot.objects.filter(removed_at=None, pool__archived_at=None)[:1_000].count()
    tenants = list(
        Tenant.objects.filter(state=Tenant.State.ACTIVE).exclude(classes=[]).order_by("id")
        .values_list("slug", flat=True)[:NAMES_SHOWN]
    )  # fmt: skip
    without_class = (
        "" if tenants else
        Tenant.objects.filter(state=Tenant.State.ACTIVE).order_by("id").values_list("slug", flat=True).first() or ""
    )  # fmt: skip
    budget = Budget.objects.filter(archived_at=None).exists()
    contract = Contract.objects.filter(archived_at=None).exists()
    revision = latest_revision()
    agent = Agent.objects.filter(state="active", live__reported_at__gt=now - SILENT_AFTER).order_by("id").first()
    waiting = agent is None and Agent.objects.filter(state="pending").exists()
    key = ApiKey.objects.filter(state=ApiKey.State.ACTIVE).select_related("tenant").order_by("id").first()
    served = anything_served()
    pool, tenant = (pools[0].slug if pools else ""), (tenants[0] if tenants else "")
    steps = (
        Step(
            "class", "A class of work", "Says how long requests may queue and what happens under overload.",
            bool(classes), ", ".join(classes), reverse("class-new"), "New class", permission="class.write",
        ),
        Step(
            "pool", "A pool", "The model, its GPUs, and which class is at home there.",
            bool(pools), ", ".join(row.slug for row in pools), reverse("pool-new"), "New pool",
            permission="pool.write",
        ),
        Step(
            "slots", "Slots of the pool", "What runs requests: one for each copy of the model.",
            slots > 0, f"{slots} slot{'' if slots == 1 else 's'}" if slots else "",
            reverse("slot-new", args=[pool]) if pool else "", "Add slots", permission="pool.write",
        ),
        _rates(now),
        Step(
            "tenant", "A tenant", "The team or customer that sends requests, with the classes it may use.",
            bool(tenants), f"{without_class} has no class yet" if without_class else ", ".join(tenants),
            reverse("tenant-edit", args=[without_class]) if without_class else reverse("tenant-new"),
            "Choose classes" if without_class else "New tenant", permission="tenant.write",
        ),
        Step(
            "budget", "A budget", "What the tenant may spend in a day, week or month. Without one there is no limit.",
            budget, "", reverse("budget-new") + (f"?tenant={tenant}" if tenant else ""), "New budget", optional=True,
            permission="budget.write",
        ),
        Step(
            "contract", "A contract", "What the class is promised. Without one nothing is judged and nobody is paged.",
            contract, "", reverse("contract-new"), "New contract", optional=True, permission="contract.write",
        ),
        Step(
            "push", "A first push", "Signs all of it as revision 1. Agents apply nothing that was not pushed.",
            revision is not None, f"revision {revision.number}" if revision else "", reverse("policy-review"),
            "Review and push", permission="policy.push",
        ),
        Step(
            "agent", "An agent", "Runs beside the GPUs and serves. The page shows the command that starts it.",
            agent is not None, agent.name if agent else "One waits for approval" if waiting else "",
            reverse("agents") if waiting else reverse("agent-enrol") + (f"?pool={pool}" if pool else ""),
            "Approve it" if waiting else "Enrol an agent", permission="agent.enrol",
        ),
        Step(
            "key", "An API key", "What the tenant's programs send along. Its secret is shown once.",
            key is not None, f"{key.name} of {key.tenant.slug}" if key else "",
            reverse("key-new", args=[tenant]) if tenant else "", "New key", permission="key.write",
        ),
        Step(
            "request", "The first request", "Send the one below. It counts here a second or two after its answer.",
            served, "admitted and answered" if served else "", reverse("requests"), "Requests",
        ),
    )  # fmt: skip
    return Guide(steps, Example(_address(agent), pools[0].model.name if pools else "", classes[0] if classes else ""))


def _rates(now: datetime) -> Step:
    """Without a card a class cannot be pushed, and without a cost rate a pool's hours have no cost."""
    lines = [line.in_force for line in cost_lines(now)] + [line.in_force for line in card_lines(now)]
    missing = lines.count(None)
    found = f"{missing} missing" if missing else "each pool and class has one" if lines else ""
    return Step(
        "rates", "Rates", "What a slot-hour costs you, and what tenants are charged for each class and model.",
        bool(lines) and not missing, found, reverse("rates"), "Rates", permission="rate.write",
    )  # fmt: skip


def _address(agent: Agent | None) -> str:
    return agent.address if agent else ""
