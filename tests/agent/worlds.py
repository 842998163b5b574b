"""A small world for agent tests: a signed policy, keys and a live list, and an agent with real sockets.

The control plane's side is played by documents that a test key signed: the same bytes that a control plane would send.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.agent.backends.base import Backend
from controlplane.agent.backends.curves import H100
from controlplane.agent.backends.sim import SimBackend
from controlplane.agent.clock import Clock
from controlplane.agent.engine import Engine
from controlplane.agent.gateway import HttpFront
from controlplane.agent.policy_state import LiveList, PolicyState, Trust
from controlplane.agent.policy_trial import trial_refusal
from controlplane.agent.routes import TenantRoutes
from controlplane.agent.spool import EpochSpool
from controlplane.core.slot_states import SlotState
from controlplane.wire import signing
from controlplane.wire.policy import (
    SCHEMA,
    ClassPolicy,
    ContractPolicy,
    FlexPolicy,
    LiveKey,
    LiveTenant,
    PolicyDocument,
    PoolPolicy,
    RatePolicy,
    SafeRate,
    SignedPolicy,
    SizeBounds,
    SlotPolicy,
    TenantPolicy,
    document_message,
    live_message,
)
from controlplane.wire.report import Exhausted, LiveDelta, LiveItem

__all__ = ["Exhausted", "LiveTenant", "SlotState"]

LOOK_S = 0.005
INSTALLATION = "11111111-2222-4333-8444-555555555555"
POOL = "llama"
MODEL = "llama-70b"
AGENT_ID = 7
SECRET = "fb_live_acme_secret"
BATCH_SECRET = "fb_live_delta_secret"
SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KID = signing.key_id(SIGNING_KEY.public_key().public_bytes_raw())


def trust() -> Trust:
    public = signing.to_text(SIGNING_KEY.public_key().public_bytes_raw())
    return Trust(INSTALLATION, POOL, {f"{use}:{KID}": public for use in ("policy", "live", "nudge")})


def class_policy(slug: str = "chat", **changes) -> ClassPolicy:
    batch = changes.pop("kind", "interactive") == "batch"
    base = {
        "id": 2 if batch else 1,
        "slug": slug,
        "kind": "batch" if batch else "interactive",
        "priority": 100,
        "min_share_ppm": 0,
        "max_prompt_tokens": 4096,
        "max_output_tokens": 512,
        "default_output_tokens": 16,
        "template_allowance_tokens": 8,
        "max_queue": 8,
        "max_wait_ms": 60_000,
        "stage_timeout_s": 30,
        "overload": "reject",
        "downgrade_to": None,
        "retry_safe": batch,
        "cancellable": True,
        "default_deadline_s": 3600,
        "models": [MODEL],
    }
    return ClassPolicy(**{**base, **changes})


def tenant_policy(slug: str = "acme", **changes) -> TenantPolicy:
    base = {
        "id": 1,
        "slug": slug,
        "weight": 1,
        "max_concurrency": 64,
        "classes": ["chat", "bulk"],
        "models": [MODEL],
        "outage_posture": "closed",
        "hard_budget": False,
        "ancestors": [],
    }
    return TenantPolicy(**{**base, **changes})


def slot(number: int, band: str = "interactive", **changes) -> SlotPolicy:
    base = {"id": number, "name": f"S{number}", "band": band, "places": 4, "kv_tokens": 60_000, "agent_id": AGENT_ID}
    return SlotPolicy(**{**base, **changes})


def rate(**changes) -> RatePolicy:
    base = {
        "rate_version": 9,
        "class_slug": "chat",
        "model_id": 5,
        "effective_from": "2020-01-01T00:00:00+00:00",
        "prompt_nanos_per_mtok": 1_000_000_000,
        "cached_nanos_per_mtok": 100_000_000,
        "output_nanos_per_mtok": 3_000_000_000,
        "gpu_nanos_per_slot_hour": 0,
        "discount_ppm": 0,
    }
    return RatePolicy(**{**base, **changes})


def flex_policy(**changes) -> FlexPolicy:
    base = {
        "lend_p95_ms": 200,
        "lend_hold_s": 20,
        "load_limit": 0.7,
        "lend_slack": 0.25,
        "return_slack": 0.35,
        "return_hold_s": 60,
        "min_hold_s": 60,
        "drain_bound_s": 10,
        "grant_ttl_s": 15,
        "cooldown_s": 15,
        "decision_interval_s": 5,
        "max_lent": None,
        "spillover_per_week": 20,
        "spillover_action": "warn",
    }
    return FlexPolicy(**{**base, **changes})


def document(revision: int = 1, **changes) -> PolicyDocument:
    pool = {
        "id": 3,
        "slug": POOL,
        "model": MODEL,
        "model_id": 5,
        "isolation": "reserved",
        "interactive_class": "chat",
        "batch_class": "bulk",
        "fairness_unit": "tokens",
        "prompt_weight": 1,
        "output_weight": 2,
        "sizes": SizeBounds(gpu_ms=[250, 2000], aging_s=10, reserve_after_ms=2000),
        "prefill_us_per_token": 20,
        "decode_us_per_token": 1000,
        "flex": flex_policy(),
        "safe_rate": SafeRate(entries={}),
        "slots": [slot(1), slot(2, "batch"), slot(3, "flex")],
    }
    pool.update(changes.pop("pool", {}))
    base = {
        "schema": SCHEMA,
        "installation": INSTALLATION,
        "revision": revision,
        "not_before": "2020-01-01T00:00:00+00:00",
        "accept_until": "2099-01-01T00:00:00+00:00",
        "pool": PoolPolicy(**pool),
        "classes": [class_policy(), class_policy("bulk", kind="batch")],
        "tenants": [tenant_policy(), tenant_policy("delta", id=2)],
        "contracts": [
            ContractPolicy(
                version_id=41,
                slug="chat-ttft",
                class_id=1,
                tenant_id=None,
                effective_from="2020-01-01T00:00:00+00:00",
                objective="latency",
                metric="ttft",
                threshold_ms=700,
            ),
            ContractPolicy(
                version_id=42,
                slug="chat-wait",
                class_id=1,
                tenant_id=None,
                effective_from="2020-01-01T00:00:00+00:00",
                objective="latency",
                metric="queue_wait",
                threshold_ms=700,
            ),
        ],
        "rates": [rate(class_slug=slug) for slug in ("chat", "bulk")],
    }
    return PolicyDocument(**{**base, **changes})


def bundle(doc: PolicyDocument, key: Ed25519PrivateKey = SIGNING_KEY) -> tuple[bytes, str]:
    """The signed bundle of a document and its digest, as the control plane would serve it."""
    body = signing.canonical(doc)
    digest = signing.digest_hex(body)
    signature = key.sign(document_message(doc, digest))
    envelope = SignedPolicy(KID, signing.to_text(signature), signing.to_text(body))
    return msgspec.json.encode(envelope), digest


def live_key(number: int = 1, **changes) -> LiveKey:
    base = {
        "number": number,
        "id": 11,
        "public_id": "k_acme",
        "tenant_id": 1,
        "state": "active",
        "hashes": [hashlib.sha256(SECRET.encode()).hexdigest()],
        "previous_until_us": None,
        "expires_us": None,
        "classes": ["chat", "bulk"],
        "default_class": "chat",
        "max_concurrency": None,
        "requests_per_s": None,
        "tokens_per_minute": None,
    }
    return LiveKey(**{**base, **changes})


def batch_key(number: int = 2, **changes) -> LiveKey:
    digest = hashlib.sha256(BATCH_SECRET.encode()).hexdigest()
    base = {"id": 12, "public_id": "k_delta", "tenant_id": 2, "hashes": [digest], "default_class": "bulk"}
    return live_key(number, **{**base, **changes})


def live_item(body, key: Ed25519PrivateKey = SIGNING_KEY, number: int | None = None) -> LiveItem:
    raw = signing.canonical(body)
    number = body.number if number is None else number
    message = live_message(installation=INSTALLATION, number=number, digest=signing.digest_hex(raw))
    return LiveItem(number, signing.to_text(raw), KID, signing.to_text(key.sign(message)))


def delta(*bodies, since: int = 0, full: bool = False) -> LiveDelta:
    through = max((body.number for body in bodies), default=since)
    return LiveDelta(since, through, full, [live_item(body) for body in bodies])


class Agent:
    """An engine behind a real listener, with a policy that was verified like any other."""

    def __init__(self, state_dir: Path, backend: Backend, doc: PolicyDocument, keys: list[LiveKey]) -> None:
        self.state_dir = state_dir
        self.policy = PolicyState(state_dir, trial_refusal)
        self.live = LiveList(state_dir)
        self.engine = Engine(clock=Clock(), backend=backend, agent_id=AGENT_ID, state_dir=state_dir)
        self.spool = EpochSpool.create(state_dir / "spool", 1, self.engine.clock.now_us())
        self.engine.start(self.spool)
        assert self.live.apply(delta(*keys), trust())
        assert self.live.apply(None, trust())
        self.apply(doc)
        self.front = HttpFront(TenantRoutes(self.engine))
        self.port = 0
        self.clients: list[object] = []

    def apply(self, doc: PolicyDocument) -> None:
        applied = self.policy.consider(*bundle(doc), trust(), now_us=self.engine.clock.now_us())
        assert applied is not None, self.policy.refused_reason
        self.engine.apply_policy(applied, self.live)

    async def listen(self) -> Agent:
        self.port = await self.front.listen("127.0.0.1", 0)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def close(self) -> None:
        self.engine.stop()
        await self.front.close(within_s=0.2)
        await self.engine.backend.close()
        self.spool.close()

    async def until(self, condition, within_s: float = 30.0) -> None:
        """Wait for something that the event loop will bring about; long enough for a machine that does much else.

        Seconds alone would tell of the machine where a promise is short: the loop is given half of the turns, too, that
        it has in that time at rest.
        """
        loop = asyncio.get_running_loop()
        end, turns = loop.time() + within_s, int(within_s / LOOK_S / 2)
        while not condition():
            assert loop.time() < end or turns > 0, "it did not happen in time"
            await asyncio.sleep(LOOK_S)
            turns -= 1

    def closed_rows(self):
        return [entry.row for entry in self.spool.state.closed]

    def assert_nothing_held(self) -> None:
        """Every reservation is back at zero and every offered request has ended."""
        engine = self.engine
        assert not engine.calls
        assert not engine.scheduler.requests
        assert not engine.desk.waiting
        assert not self.spool.state.opened
        for tenant in engine.registry.tenants.values():
            assert tenant.view.concurrency is not None and tenant.view.concurrency.held == 0
        for key in engine.registry.keys.values():
            assert key.view.concurrency is not None and key.view.concurrency.held == 0
        for running in engine.scheduler.slots:
            assert not running.running and running.kv_free == running.kv_tokens and running.outstanding_gpu_us == 0
        for agent_slot in engine.slots.values():
            assert agent_slot.metered.meter.running == 0
        assert engine.leases.reserved_nanos == 0


def sim(speed: float = 0.0, seed: int = 1) -> SimBackend:
    return SimBackend(H100, seed=seed, speed=speed)
