"""Each refusal is counted, and told afterwards by the id that its client got: agent, exchange and pages together."""

from __future__ import annotations

import asyncio

import openai
import pytest
from django.urls import reverse

from controlplane.core.reasons import Reason
from controlplane.usage.models import DecisionSample, RefusalMinute
from tests import factories
from tests.agent import control_planes as cp

pytestmark = pytest.mark.django_db(transaction=True)
REFUSED = 130


async def refused_ids(process) -> list[str]:
    """Ids of requests that ask for more output than the class allows."""
    async with openai.AsyncOpenAI(
        api_key=cp.SECRET, base_url=f"http://127.0.0.1:{process.port}/v1", max_retries=0, timeout=60
    ) as ai:

        async def one() -> str:
            with pytest.raises(openai.BadRequestError) as caught:
                await ai.chat.completions.create(
                    model="llama-70b", messages=[{"role": "user", "content": "hello"}], max_tokens=1_000_000
                )
            return caught.value.response.headers["x-request-id"]

        return await asyncio.gather(*(one() for _ in range(REFUSED)))


async def test_every_refusal_can_be_asked_about(world, tmp_path):
    async with cp.serving_agent(world, tmp_path / "state") as process:
        ids = await refused_ids(process)
    assert len(set(ids)) == REFUSED
    await cp.in_database(look)(world, ids)


def look(world, ids: list[str]) -> None:
    rows = RefusalMinute.objects.filter(reason=Reason.OUTPUT_TOO_LONG.code, tenant_id=world.tenant.pk)
    assert sum(row.count for row in rows) == REFUSED, "counted exactly"
    kept = {str(one) for one in DecisionSample.objects.filter(decision="reject").values_list("request_id", flat=True)}
    assert 100 <= len(kept) <= 100 * len(rows), "the first hundred of each minute"
    person = factories.person("tenant", tenant_row=world.tenant)
    stranger = factories.person("tenant", tenant_row=factories.tenant("elsewhere"), name="stranger")
    for one in ids:
        page = person.get(reverse("request", args=[one]))
        assert page.status_code == 200, one
        said = "Refused at admission: output too long" if one in kept else "its explanation was not kept"
        assert said in page.content.decode()
        assert stranger.get(reverse("request", args=[one])).status_code == 404
