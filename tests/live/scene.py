"""A fleet with something to see: one pool that burns, one that is silent, with reports, rollups and decisions."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec
from django.db import connection

from controlplane.contracts.models import Contract, ContractVersion, ObjectiveMinute, WorkloadClass
from controlplane.core.flex import decide
from controlplane.core.flex_policy import FlexPolicy, SafeRate
from controlplane.core.flex_snapshot import BatchJob, FlexSlot, FlexSnapshot, InteractiveFigures
from controlplane.core.histogram import Histogram
from controlplane.core.period import to_us
from controlplane.core.reasons import Outcome, Reason
from controlplane.core.slot_states import Band, SlotState
from controlplane.fleet.models import Agent, AgentLive, Pool, Slot, SlotInterval, SlotTenure
from controlplane.flex.evidence import actions_as_json, checks_as_json, snapshot_as_json
from controlplane.flex.models import Decision, Grant, Lend, PoolSample
from controlplane.tenants.models import Tenant
from controlplane.usage.models import DecisionSample, RefusalMinute, RollupDelta, SlotMinute
from controlplane.usage.sketch import Sketch
from controlplane.wire.report import ClassLive, LiveFigures, SlotLive, TenantLive
from tests import factories

BANDS = (("i1", "interactive"), ("i2", "interactive"), ("i3", "interactive"), ("i4", "interactive"), ("b1", "batch"),
         ("b2", "batch"), ("f1", "flex"), ("f2", "flex"))  # fmt: skip


@dataclass
class Scene:
    pool: Pool
    silent: Pool
    agents: list[Agent]
    slots: dict[str, Slot]
    chat: WorkloadClass
    bulk: WorkloadClass
    acme: Tenant
    globex: Tenant
    contract: Contract
    version: ContractVersion
    request_id: uuid.UUID
    refused_id: uuid.UUID


def contract_row(slug: str, klass: WorkloadClass, now: datetime, **values: Any) -> tuple[Contract, ContractVersion]:
    tenant = values.pop("tenant", None)
    row = Contract.objects.create(
        slug=slug, name=values.pop("name", ""), workload_class=klass, tenant=tenant, created_at=now
    )
    defaults = {
        "number": 1, "effective_from": now - timedelta(days=40), "target_ppm": 990_000, "threshold_ms": 250,
        "metric": "ttft", "window_s": 900, "created_by": "admin", "created_at": now,
    }  # fmt: skip
    return row, ContractVersion.objects.create(contract=row, **{**defaults, **values})


def objective(version: ContractVersion, pool: Pool, minute: datetime, offered: int, bad: int, **values: Any) -> None:
    row = {
        "offered": offered, "admitted": offered - values.get("refused", 0),
        "successful": offered - values.get("refused", 0), "good": offered - bad,
        "bad": {"slow": bad} if bad else {},
    }  # fmt: skip
    row |= {"bad" if name == "causes" else name: value for name, value in values.items() if name != "refused"}
    ObjectiveMinute.objects.create(contract_version_id=version.pk, pool_id=pool.pk, minute=minute, **row)


def class_live(klass: WorkloadClass, **values: Any) -> ClassLive:
    row: dict[str, Any] = {
        "class_id": klass.pk, "depth": 0, "oldest_age_us": None, "running": 0, "head_request_id": "", "head_reason": "",
        "arrivals_per_s": 0.0, "departures_per_s": 0.0, "admitted_per_s_60s": 0.0, "residence_mean_us": None,
        "present_mean": 0.0, "departures": 0, "refused_60s": {}, "wait_60s": [], "ttft_60s": [],
    }  # fmt: skip
    return ClassLive(**(row | values))


def tenant_live(klass: WorkloadClass, tenant: Tenant, **values: Any) -> TenantLive:
    row: dict[str, Any] = {
        "class_id": klass.pk, "tenant_id": tenant.pk, "depth": 0, "oldest_age_us": None, "running": 0, "counter": 0.0,
        "arrivals_per_s": 0.0, "departures_per_s": 0.0, "residence_mean_us": None, "present_mean": 0.0,
    }  # fmt: skip
    return TenantLive(**(row | values))


def say(agent: Agent, now: datetime, figures: LiveFigures | None, **values: Any) -> AgentLive:
    """The last report of an agent."""
    said = msgspec.to_builtins(figures) if figures is not None else {}
    row, _ = AgentLive.objects.update_or_create(
        agent=agent, defaults={"epoch": 1, "seq": 1, "reported_at": now, "figures": said, **values}
    )
    return row


def chat_figures(scene: Scene, now: datetime, *, depth: int = 19, head: uuid.UUID | None = None) -> LiveFigures:
    waits = Histogram()
    for wait_ms in (20, 40, 80, 120, 150, 188):
        waits.record(wait_ms * 1_000, 10)
    slots = [SlotLive(slot.pk, "ready", "home", 1, 3, 0, 0, 4_000, 60_000) for slot in scene.slots.values()]
    return LiveFigures(
        at_us=to_us(now),
        slots=slots,
        classes=[
            class_live(
                scene.chat, depth=depth, oldest_age_us=410_000, running=24, head_request_id=str(head or ""),
                head_reason="kv_memory" if head else "", arrivals_per_s=9.9, departures_per_s=9.4,
                residence_mean_us=2_810_000, present_mean=33.1, wait_60s=waits.to_sparse(), admitted_per_s_60s=9.5,
            ),
            class_live(
                scene.bulk, depth=412, oldest_age_us=3_412_000_000, running=12, departures_per_s=0.31,
                residence_mean_us=30_000_000, present_mean=421.0,
            ),
        ],
        tenants=[
            tenant_live(
                scene.chat, scene.globex, depth=depth - 3, oldest_age_us=410_000, running=14, arrivals_per_s=5.8,
                departures_per_s=5.3, residence_mean_us=3_100_000, present_mean=26.3,
            ),
            tenant_live(
                scene.chat, scene.acme, depth=3, oldest_age_us=120_000, running=10, arrivals_per_s=2.7,
                departures_per_s=2.7, residence_mean_us=2_590_000, present_mean=7.1,
            ),
            tenant_live(scene.bulk, scene.acme, depth=412, oldest_age_us=3_412_000_000, running=12),
        ],
    )  # fmt: skip


def build(now: datetime) -> Scene:
    """Everything at `now`; a whole number of seconds into a minute."""
    factories.installation()
    chat, bulk = factories.workload_class("chat"), factories.workload_class("bulk", "batch")
    embed = factories.workload_class("embed")
    acme = factories.tenant("acme")
    globex = factories.tenant("globex", classes=["chat"])
    pool = factories.pool("chat-70b", demo_values=True, drain_bound_s=30)
    silent = factories.pool("embed-m", model="embed-m", interactive_class="embed", batch_class="")
    agents = [factories.agent(pool, "chat-a1"), factories.agent(pool, "chat-a2"), factories.agent(silent, "emb-2")]
    started = now - timedelta(hours=5)
    slots = {}
    for number, (name, band) in enumerate(BANDS):
        slots[name] = Slot.objects.create(pool=pool, name=name, band=band, agent=agents[number % 2])
        SlotTenure.objects.create(slot=slots[name], started_at=started)
    for name in ("i1", "i2"):
        row = Slot.objects.create(pool=silent, name=name, band="interactive", agent=agents[2])
        SlotTenure.objects.create(slot=row, started_at=started)
        SlotInterval.objects.create(slot=row, state="home", owner_class="embed", started_at=started)
    contract, version = contract_row("chat-ttft", chat, now, name="chat · TTFT")
    scene = Scene(pool, silent, agents, slots, chat, bulk, acme, globex, contract, version, uuid.uuid4(), uuid.uuid4())
    _contracts(scene, embed, now)
    _reports(scene, embed, now)
    _band(scene, now)
    _stages(scene, now)
    _requests(scene, now)
    return scene


def _contracts(scene: Scene, embed: WorkloadClass, now: datetime) -> None:
    _, calm = contract_row("chat-e2e", scene.chat, now, name="chat · end to end", metric="e2e", threshold_ms=30_000)
    contract_row("embed-e2e", embed, now, name="embed · end to end", metric="e2e", threshold_ms=80)
    minute = now.replace(second=0, microsecond=0)
    for back in range(90):
        at = minute - timedelta(minutes=back)
        bad = max(0, 60 - 5 * back) if back < 11 else 3
        objective(scene.version, scene.pool, at, 600, bad, refused=min(bad, 10))
        objective(calm, scene.pool, at, 600, 1)
    for reason, tenant, count in ((Reason.RATE_LIMIT, scene.globex, 214), (Reason.WAIT_TOO_LONG, scene.globex, 38)):
        RefusalMinute.objects.create(
            minute=minute, pool_id=scene.pool.pk, tenant_id=tenant.pk, class_id=scene.chat.pk, reason=reason.code,
            count=count,
        )  # fmt: skip


def _reports(scene: Scene, embed: WorkloadClass, now: datetime) -> None:
    say(scene.agents[0], now - timedelta(seconds=1), chat_figures(scene, now, head=scene.request_id))
    empty = LiveFigures(at_us=to_us(now), slots=[], classes=[class_live(scene.chat)], tenants=[])
    say(scene.agents[1], now - timedelta(milliseconds=700), empty)
    embedding = LiveFigures(at_us=to_us(now), slots=[], classes=[class_live(embed, depth=3)], tenants=[])
    say(scene.agents[2], now - timedelta(seconds=112), embedding)


def snapshot(scene: Scene, now: datetime, *, p95_ms: int, hours: float, lent: tuple[str, ...] = ()) -> FlexSnapshot:
    us = to_us(now)
    slots = [
        FlexSlot(
            name=name,
            band=Band(band),
            state=SlotState.LENT if name in lent else SlotState.HOME,
            lent_at_us=us - 1_800_000_000 if name in lent else None,
            grant_expires_at_us=us + 13_000_000 if name in lent else None,
            fence=3 if name in lent else 2,
        )
        for name, band in BANDS
    ]
    return FlexSnapshot(
        now_us=us,
        policy=FlexPolicy(),
        safe_rate=SafeRate(entries=((4, 16.0), (5, 20.0), (6, 24.0)), valid_until_us=us + 86_400_000_000),
        slots=tuple(slots),
        interactive=InteractiveFigures(
            admitted_per_s=9.5, p95_queue_us=p95_ms * 1_000, p95_below_since_us=us - 1_360_000_000,
            telemetry_at_us=us - 1_200_000,
        ),
        jobs=(BatchJob(name="nightly", remaining_gpu_us=int(36_000e6), deadline_us=us + int(hours * 3_600e6)),),
        lends_this_week=17,
    )  # fmt: skip


def decision(pool: Pool, at: datetime, seen: FlexSnapshot, actions: list[dict[str, Any]] | None = None) -> Decision:
    made = decide(seen)
    return Decision.objects.create(
        pool=pool, at=at, term=1, snapshot=snapshot_as_json(seen), required=2.5, available=3.0, slack=made.slack,
        checks=checks_as_json(made), actions=actions_as_json(made) if actions is None else actions,
    )  # fmt: skip


def _band(scene: Scene, now: datetime) -> None:
    """f1 lent for half an hour; f2 lent, recalled 18 s ago and draining; both were away once before."""
    started = now - timedelta(hours=5)
    lent_f1, lent_f2, recalled_f2 = (
        now - timedelta(minutes=30),
        now - timedelta(minutes=42),
        now - timedelta(seconds=18),
    )
    lend_f2 = decision(scene.pool, lent_f2, snapshot(scene, lent_f2, p95_ms=61, hours=3))
    lend_f1 = decision(scene.pool, lent_f1, snapshot(scene, lent_f1, p95_ms=61, hours=3))
    acts = [{"kind": "recall", "slot": "f2", "fence": 4, "reason": "batch_slack"}]
    recall = decision(
        scene.pool, recalled_f2, snapshot(scene, recalled_f2, p95_ms=188, hours=5, lent=("f1", "f2")), acts
    )
    for name, slot in scene.slots.items():
        owner = "bulk" if name.startswith("b") else "chat"
        if not name.startswith("f"):
            SlotInterval.objects.create(slot=slot, state="home", owner_class=owner, started_at=started)
    _history(scene.slots["f1"], [("home", started), ("lent", lent_f1)])
    _history(scene.slots["f2"], [("home", started), ("lent", lent_f2), ("draining", recalled_f2)])
    Grant.objects.create(
        slot=scene.slots["f1"], fence=3, action="lend", state="lent", lent_at=lent_f1, ttl_us=15_000_000,
        expires_at=now + timedelta(seconds=13), renewed_at=now,
    )  # fmt: skip
    Grant.objects.create(
        slot=scene.slots["f2"], fence=4, action="recall", state="draining", lent_at=lent_f2, recalled_at=recalled_f2,
        reason="batch_slack",
    )  # fmt: skip
    Lend.objects.create(pool=scene.pool, slot=scene.slots["f1"], fence=3, lent_at=lent_f1, lend_decision=lend_f1)
    Lend.objects.create(
        pool=scene.pool, slot=scene.slots["f2"], fence=3, lent_at=lent_f2, lend_decision=lend_f2,
        recalled_at=recalled_f2, recall_reason="batch_slack", recall_decision=recall,
    )  # fmt: skip
    sample(scene, now)
    minute = now.replace(second=0, microsecond=0)
    for slot in scene.slots.values():
        for back in range(62):
            if slot.name == "i3" and 50 <= back <= 53:
                continue
            SlotMinute.objects.create(
                slot_id=slot.pk, minute=minute - timedelta(minutes=back), busy_us=30_000_000, observed_us=60_000_000
            )


def sample(scene: Scene, at: datetime, *, p95_ms: int = 188) -> PoolSample:
    seen = snapshot(scene, at, p95_ms=p95_ms, hours=3, lent=("f1",))
    return PoolSample.objects.create(
        pool=scene.pool, at=at, p95_queue_us=p95_ms * 1_000, admitted_per_s=9.5, safe_rate_per_s=16.0, slack=0.4,
        telemetry_age_us=1_200_000, figures={"seen": snapshot_as_json(seen, with_limits=False), "marks": {}},
    )  # fmt: skip


def _history(slot: Slot, states: list[tuple[str, datetime]]) -> None:
    for number, (state, at) in enumerate(states):
        ends = states[number + 1][1] if number + 1 < len(states) else None
        owner = "chat" if state == "home" else "bulk"
        SlotInterval.objects.create(slot=slot, state=state, owner_class=owner, started_at=at, ended_at=ends)


def rollup(pool: Pool, klass: WorkloadClass, tenant: Tenant, minute: datetime, times: list[list[int]]) -> None:
    """One delta of streamed requests by their stage times in microseconds."""
    sketch = Sketch()
    for stages in times:
        sketch.stack.record(stages)
        for name, us in zip(
            ("admission", "queue", "batch_wait", "preprocess", "prefill", "decode", "return_"), stages, strict=True
        ):
            sketch.histograms[name].record(us)
        sketch.histograms["ttft"].record(sum(stages[:5]))
    RollupDelta.objects.create(
        minute=minute, pool_id=pool.pk, tenant_id=tenant.pk, class_id=klass.pk, model_id=pool.model_id, rate_version=0,
        outcome=Outcome.COMPLETED.code, requests=len(times), prompt_tokens=0, cached_tokens=0, output_tokens=0,
        gpu_us=0, charge_prompt_nanos=0, charge_cached_nanos=0, charge_output_nanos=0, charge_gpu_nanos=0,
        stages=sketch.to_bytes(),
    )  # fmt: skip


def _stages(scene: Scene, now: datetime) -> None:
    chance = random.Random(7)
    minute = now.replace(second=0, microsecond=0)
    for back in range(15):
        queue_us = 1_900_000 if back < 11 else 60_000
        queue_us = int(queue_us * (1 - back / 22))
        times = [
            [2_000, int(queue_us * chance.uniform(0.2, 1.0)), 4_000, 6_000, chance.randint(40_000, 70_000),
             chance.randint(300_000, 700_000), 1_000]
            for _ in range(120)
        ]  # fmt: skip
        rollup(scene.pool, scene.chat, scene.acme, minute - timedelta(minutes=back), times)


_RECORD = """
INSERT INTO usage_record (request_id, received_at, arrived_at, ended_at, attempt, agent_id, pool_id, slot_id, tenant_id,
  key_id, class_id, asked_class_id, model_id, job_id, revision, rate_version, outcome, status, flags, prompt_tokens,
  cached_tokens, output_tokens, admission_us, queue_us, batch_wait_us, preprocess_us, prefill_us, decode_us, return_us,
  ttft_us, gpu_us, estimated_gpu_us, charge_prompt_nanos, charge_cached_nanos, charge_output_nanos, charge_gpu_nanos,
  client_request_id)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, 1, %s, %s, %s, 0, 42, 3, %s, %s, %s, 1812, 1024, %s, 2100, %s, 7400, 7100,
  125800, %s, 800, %s, 5442100, 5100000, 472800, 61440, 513600, 0, 'client-77')
"""


def record(scene: Scene, request_id: uuid.UUID, ended: datetime, *, attempt: int = 1, outcome: Outcome, queue_us: int,
           decode_us: int, flags: int = 1, tenant: Tenant | None = None) -> None:  # fmt: skip
    arrived = ended - timedelta(microseconds=2_100 + queue_us + 7_400 + 7_100 + 125_800 + decode_us + 800)
    with connection.cursor() as cursor:
        cursor.execute(
            _RECORD,
            [request_id, ended, arrived, ended, attempt, scene.agents[0].pk, scene.pool.pk, scene.slots["i2"].pk,
             (tenant or scene.globex).pk, scene.chat.pk, scene.chat.pk, scene.pool.model_id, outcome.code,
             200 if outcome is Outcome.COMPLETED else 502, flags, 214 if outcome is Outcome.COMPLETED else 0, queue_us,
             decode_us, queue_us + 143_000],
        )  # fmt: skip


def _requests(scene: Scene, now: datetime) -> None:
    record(
        scene,
        scene.request_id,
        now - timedelta(seconds=11),
        outcome=Outcome.UPSTREAM_ERROR,
        queue_us=429_300,
        decode_us=0,
        flags=5,
    )
    record(
        scene,
        scene.request_id,
        now - timedelta(seconds=5),
        attempt=2,
        outcome=Outcome.COMPLETED,
        queue_us=491_900,
        decode_us=5_300_000,
    )
    for number in range(12):
        ended = now - timedelta(seconds=20 + 7 * number)
        record(scene, uuid.uuid4(), ended, outcome=Outcome.COMPLETED, queue_us=20_000 * (number + 1),
               decode_us=2_000_000, tenant=scene.acme if number % 2 else scene.globex)  # fmt: skip
    DecisionSample.objects.create(
        request_id=scene.refused_id, at=now - timedelta(seconds=30), agent_id=scene.agents[0].pk, pool_id=scene.pool.pk,
        tenant_id=scene.globex.pk, key_id=1, class_id=scene.chat.pk, decision="reject", reason=Reason.RATE_LIMIT.code,
        checks=[["key", "fb_7c2", "active", True], ["class_allowed", "chat", "chat", True],
                ["rate", "0.3 tokens in the bucket", "1.0", False], ["queue", "14", "64", True]],
    )  # fmt: skip
