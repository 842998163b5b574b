"""Would a request with this key be admitted now? Decided by the agents' own code, on what their policy and reports say.

A pool's agents are taken as one: all their slots, the tenant's requests on every agent, and what is left of its hard
budgets instead of one lease. Buckets of rates are full, as after a second without a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from controlplane.agent.front_desk import stranger
from controlplane.agent.policy_state import LiveList
from controlplane.agent.refusal_log import check_row
from controlplane.agent.registry import ClassEntry, KeyEntry, Registry, TenantEntry
from controlplane.agent.rescheduling import build
from controlplane.budgets.models import Budget
from controlplane.budgets.queries import ancestors, standings
from controlplane.contracts.models import WorkloadClass
from controlplane.core.admission import AdmissionDecision, Decision, charge_bound_nanos, decide, explain_checks
from controlplane.core.admission_snapshot import BudgetView, Snapshot
from controlplane.core.estimate import raw_gpu_us
from controlplane.core.money import format_nanos
from controlplane.core.period import to_us
from controlplane.core.pricing import charge_upper_bound_nanos
from controlplane.core.reservations import ConcurrencyCounter, LeasePurse
from controlplane.fleet.models import AgentLive, Pool
from controlplane.flex.band_now import FRESH
from controlplane.live.check_labels import CheckRow, check_rows
from controlplane.policy.live_list import class_body, key_body, tenant_body
from controlplane.policy.queries import document_in_force
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.wire.policy import PolicyDocument
from controlplane.wire.report import Check

OF_LOAD: Final = frozenset({"tenant_concurrency", "queue_depth", "queue_wait_ms", "memory_kv_tokens"})
WORDS: Final = {
    Decision.ADMIT: ("ok", "Admitted"),
    Decision.QUEUE: ("risk", "Queued"),
    Decision.DOWNGRADE: ("risk", "Downgraded"),
    Decision.REJECT: ("bad", "Refused"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a dry run takes it; an `output_tokens` of None takes the default of its class."""

    class_slug: str
    model: str
    prompt_tokens: int
    output_tokens: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What the agents of a pool would answer. `reported` False: none reported lately, so nothing is known of load."""

    pool: Pool
    revision: int
    reported: bool
    grade: str
    word: str
    reason: str
    retry_after_s: int | None
    wait_us: int | None
    charge_nanos: int
    served_class: str
    checks: list[CheckRow]

    @property
    def told(self) -> str:
        return f"by revision {self.revision}"

    @property
    def facts(self) -> list[dict[str, Any]]:
        """What a client would notice beside the answer."""
        found = [{"label": "Charged at most", "value": format_nanos(self.charge_nanos)}]
        if self.wait_us is not None:
            found.append({"label": "Estimated wait, ms", "value": f"{self.wait_us / 1_000:g}"})
        if self.retry_after_s is not None:
            found.append({"label": "Retry-After, s", "value": str(self.retry_after_s)})
        return found


def answers(key: ApiKey, asked: Asked, now: datetime) -> list[Answer]:
    """One answer for each pool whose policy in force serves the class and the model; in order of slug."""
    reports = _reports(now)
    left = _left_nanos(key.tenant, now)
    found = []
    for pool in Pool.objects.filter(archived_at=None).select_related("model").order_by("slug"):
        in_force = document_in_force(pool.pk)
        if in_force is None or in_force[1].pool.model != asked.model:
            continue
        revision, document = in_force
        if asked.class_slug in {policy.slug for policy in document.classes}:
            said = [figures for pool_id, figures in reports if pool_id == pool.pk]
            world = _World(document, key, [figures for _, figures in reports], said, left, now)
            found.append(world.answer(pool, revision, asked))
    return found


class _World:
    """What an agent of a pool would look its request up in."""

    def __init__(
        self,
        document: PolicyDocument,
        key: ApiKey,
        everywhere: Sequence[Mapping[str, Any]],
        here: Sequence[Mapping[str, Any]],
        left: tuple[int, datetime] | None,
        now: datetime,
    ) -> None:
        self.document, self.key, self.here, self.left, self.now_us = document, key, here, left, to_us(now)
        self.registry = Registry()
        self.registry.take(document)
        self.registry.apply_live(_live_list(key), self.now_us)
        held = [
            row for figures in everywhere for row in figures.get("tenants", ()) if row["tenant_id"] == key.tenant_id
        ]
        tenant = self.registry.tenants.get(key.tenant_id)
        if tenant is not None and tenant.view.concurrency is not None:
            tenant.view.concurrency = ConcurrencyCounter(
                tenant.view.concurrency.limit,
                running=sum(row["running"] for row in held),
                queued=sum(row["depth"] for row in held),
            )

    def answer(self, pool: Pool, revision: int, asked: Asked) -> Answer:
        klass = self.registry.classes[asked.class_slug]
        entry = self.registry.keys[self.key.pk]
        tenant = self.registry.tenants.get(self.key.tenant_id) or stranger(entry)
        snapshot = self._snapshot(entry, tenant, klass, asked)
        fallback = klass.policy.downgrade_to
        lower = None if fallback is None else self.registry.classes.get(fallback)
        said = decide(snapshot, lambda: None if lower is None else self._snapshot(entry, tenant, lower, asked))
        grade, word = WORDS[said.decision]
        if not self.here and said.decision is not Decision.REJECT:
            grade, word = "unknown", f"{word} if nothing runs"
        return Answer(
            pool, revision, bool(self.here), grade, word, "" if said.reason is None else said.reason.value,
            said.retry_after_s, said.estimated_wait_us if self.here else None, charge_bound_nanos(snapshot),
            _served(said, klass),
            check_rows(self._told(check_row(check)) for check in explain_checks(snapshot)),
        )  # fmt: skip

    def _told(self, check: Check) -> tuple[str, str, str, bool | None]:
        """What depends on load is unknown while no agent of the pool tells of it; of single keys none ever tells."""
        unknown = check.name in OF_LOAD and not self.here
        unknown = unknown or (check.name == "key_concurrency" and check.limit != "")
        return check.name, "" if unknown else check.value, check.limit, None if unknown else check.held

    def _snapshot(self, key: KeyEntry, tenant: TenantEntry, klass: ClassEntry, asked: Asked) -> Snapshot:
        registry, policy = self.registry, klass.policy
        learnt = self._learnt(tenant.policy.id, policy.id)
        estimate = registry.estimate_of(tenant.policy.id, policy.id)
        most = asked.output_tokens or min(policy.default_output_tokens, policy.max_output_tokens)
        expected = min(most, round(learnt["expected_output"] or estimate.output_tokens(most)))
        gpu_us = round((learnt["bias"] or estimate.bias) * raw_gpu_us(registry.rates, asked.prompt_tokens, expected))
        card = registry.card_at(policy.slug, self.now_us)
        snapshot = Snapshot(
            self.now_us, key.view, tenant.view, klass.view, card, None, asked.model, asked.prompt_tokens,
            asked.prompt_tokens + policy.template_allowance_tokens, most, expected, 1, klass.stage_timeout_us,
        )  # fmt: skip
        if tenant.policy.hard_budget:
            snapshot.budget = self._budget(tenant, snapshot)
        scheduler = build(self.document, [slot for slot in self.document.pool.slots if slot.agent_id is not None])
        scheduler.observe(
            snapshot, kv_tokens=asked.prompt_tokens + expected, gpu_us=gpu_us, deadline_us=None, may_run_lent=False
        )
        self._load(snapshot, policy.id, gpu_us)
        return snapshot

    def _learnt(self, tenant_id: int, class_id: int) -> dict[str, float | None]:
        """Of what agents learnt of this tenant's requests, the most: a wait is not told too short."""
        rows = [
            row for figures in self.here for row in figures.get("tenants", ())
            if (row["tenant_id"], row["class_id"]) == (tenant_id, class_id)
        ]  # fmt: skip
        return {
            name: max((row[name] for row in rows if row.get(name) is not None), default=None)
            for name in ("bias", "expected_output")
        }

    def _load(self, snapshot: Snapshot, class_id: int, gpu_us: int) -> None:
        """What waits already, as if each were like this request."""
        depth = sum(
            row["depth"] for figures in self.here for row in figures.get("classes", ()) if row["class_id"] == class_id
        )
        if depth:
            snapshot.queue_depth, snapshot.free_now = depth, False
            snapshot.work_ahead_gpu_us = depth * gpu_us

    def _budget(self, tenant: TenantEntry, snapshot: Snapshot) -> BudgetView:
        bound = charge_upper_bound_nanos(
            snapshot.card, snapshot.prompt_bound_tokens, snapshot.max_output_tokens, 1, snapshot.stage_timeout_us
        )
        left_nanos, ends_at = self.left if self.left is not None else (bound, None)
        ends_us = None if ends_at is None else to_us(ends_at)
        return BudgetView(LeasePurse(max(0, left_nanos)), posture=tenant.posture, window_ends_at_us=ends_us)


def _served(said: AdmissionDecision, klass: ClassEntry) -> str:
    served = said.served_snapshot
    return klass.policy.slug if served is None else served.workload_class.slug


def _live_list(key: ApiKey) -> LiveList:
    """The key, and everything that is suspended, as they stand now: revocation waits for no push."""
    live = LiveList(Path())
    live.whole, live.keys = True, {key.pk: key_body(key)}
    live.tenants = {row.pk: tenant_body(row) for row in Tenant.objects.filter(pk=key.tenant_id)}
    live.classes = {row.pk: class_body(row) for row in WorkloadClass.objects.all()}
    return live


def _reports(now: datetime) -> list[tuple[int, Mapping[str, Any]]]:
    """(pool, what an agent of it said lately)."""
    rows = AgentLive.objects.filter(reported_at__gt=now - FRESH, agent__retired_at=None)
    return list(rows.values_list("agent__pool_id", "figures"))


def _left_nanos(tenant: Tenant, now: datetime) -> tuple[int, datetime] | None:
    """What is left of the tightest hard budget of the tenant and those above it, and when its window ends."""
    levels = [tenant, *ancestors(tenant)]
    hard = Budget.objects.filter(tenant__in=levels, hard=True, archived_at=None).select_related("tenant")
    return min(((row.left_nanos, row.ends_at) for row in standings(hard, now)), default=None)
