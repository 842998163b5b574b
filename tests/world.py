"""A small fleet for tests of the exchange: one pool with eight slots, a tenant with a key and a rate card."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from controlplane.contracts.models import WorkloadClass
from controlplane.core.pricing import RateCard as Prices
from controlplane.fleet.models import EnrolmentToken, Pool, Slot
from controlplane.ledger.models import RateCard
from controlplane.tenants.models import ApiKey, Tenant
from tests import factories

BANDS = ("interactive",) * 4 + ("batch",) * 2 + ("flex",) * 2


@dataclass
class World:
    pool: Pool
    slots: list[Slot]
    tenant: Tenant
    key: ApiKey
    chat: WorkloadClass
    bulk: WorkloadClass
    card: RateCard
    prices: Prices

    def token(self, **values) -> str:
        return enrolment_token(self.pool, **values)


def enrolment_token(pool: Pool, *, lives: timedelta = timedelta(hours=1)) -> str:
    secret = f"fbe_{secrets.token_urlsafe(24)}"
    now = datetime.now(UTC)
    EnrolmentToken.objects.create(
        prefix=secret[:12],
        token_hash=hashlib.sha256(secret.encode()).hexdigest(),
        pool=pool,
        created_by="admin",
        created_at=now,
        expires_at=now + lives,
    )
    return secret


def build_world() -> World:
    factories.installation()
    chat = factories.workload_class("chat")
    bulk = factories.workload_class("bulk", "batch")
    tenant = factories.tenant("acme")
    pool = factories.pool()
    slots = [Slot.objects.create(pool=pool, name=f"{band[0]}{number}", band=band) for number, band in enumerate(BANDS)]
    key = ApiKey.objects.create(
        public_id="key-1", tenant=tenant, name="first", prefix="fb_1", secret_hash="0" * 64, classes=["chat", "bulk"],
        default_class="chat", created_at=factories.NOW,
    )  # fmt: skip
    card = RateCard.objects.create(
        class_slug="chat", model=pool.model, effective_from=factories.NOW, prompt_nanos_per_mtok=1_400_000_000,
        cached_nanos_per_mtok=260_000_000, output_nanos_per_mtok=4_400_000_000, created_at=factories.NOW,
        created_by="finance",
    )  # fmt: skip
    prices = Prices(1_400_000_000, 260_000_000, 4_400_000_000, 0, 0, card.pk)
    return World(pool, slots, tenant, key, chat, bulk, card, prices)
