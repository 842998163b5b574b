"""A tenant's member sees its own usage to the minute and what helps against a refusal; nobody else's."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.budgets.templatetags.remedies import REMEDIES, remedy
from controlplane.core.reasons import Reason
from controlplane.tenants.models import Tenant
from controlplane.usage.models import RefusalMinute, RollupDelta, RollupMinute
from tests import factories

pytestmark = pytest.mark.django_db
SUMS = {"prompt_tokens": 1_200, "cached_tokens": 200, "output_tokens": 300, "gpu_us": 5}
CHARGES = {
    "charge_prompt_nanos": 2_000_000_000, "charge_cached_nanos": 0, "charge_output_nanos": 500_000_000,
    "charge_gpu_nanos": 0,
}  # fmt: skip


def used(kind, tenant, minute, class_id, requests):
    kind.objects.create(
        minute=minute, pool_id=1, tenant_id=tenant.pk, class_id=class_id, model_id=1, rate_version=1, outcome=0,
        requests=requests, stages=b"", **SUMS, **CHARGES,
    )  # fmt: skip


def test_every_reason_says_what_helps():
    assert set(REMEDIES) == set(Reason) and all(text.endswith(".") for text in REMEDIES.values())
    assert remedy("of a later release") == "—"


def test_own_usage_by_minute_and_class(people):
    chat = factories.workload_class("chat")
    now = timezone.now().replace(second=0, microsecond=0)
    acme, stranger = Tenant.objects.get(slug="acme"), Tenant.objects.get(slug="stranger")
    used(RollupMinute, acme, now - timedelta(minutes=5), chat.pk, 7)
    used(RollupDelta, acme, now - timedelta(minutes=5), chat.pk, 4)
    used(RollupDelta, acme, now, chat.pk, 3)
    used(RollupMinute, acme, now - timedelta(minutes=90), chat.pk, 99)
    used(RollupMinute, stranger, now - timedelta(minutes=5), chat.pk, 12_345)
    page = people["tenant"].get("/tenants/acme/usage/").content.decode()
    assert "14 requests" in page and "7.50" in page and "12,345" not in page
    rows = b"".join(people["tenant"].get("/tenants/acme/usage/?format=csv")).decode().splitlines()
    assert len(rows) == 3 and ",chat,3," in rows[1] and ",chat,11," in rows[2]
    assert "113 requests" in people["tenant"].get("/tenants/acme/usage/?minutes=360").content.decode()
    assert people["tenant"].get("/tenants/stranger/usage/").status_code == 404
    assert people["viewer"].get("/tenants/stranger/usage/").status_code == 200


def test_own_refusals_with_what_helps(people):
    acme = Tenant.objects.get(slug="acme")
    minute = timezone.now().replace(second=0, microsecond=0)
    reason = Reason.RATE_LIMIT.code
    RefusalMinute.objects.create(minute=minute, pool_id=1, tenant_id=acme.pk, class_id=1, reason=reason, count=5)
    page = people["tenant"].get("/tenants/acme/").content.decode()
    assert "rate_limit" in page and "Slow down to what retry-after says." in page
