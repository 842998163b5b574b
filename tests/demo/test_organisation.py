"""The demo's organisation and its agents: made where missing, gone on with where their state is there."""

import pytest
from django.utils import timezone

from controlplane.demo.organisation import seed
from controlplane.demo.shape import BIG_POOL, SMALL_POOL, Bounds
from controlplane.fleet.models import Agent, Pool
from tests import factories

pytestmark = pytest.mark.django_db


def test_an_agent_whose_folder_is_gone_makes_room_for_one_that_enrols(tmp_path):
    """The database goes on from an earlier run, but nobody has the agent's key any more."""

    def again(here):
        seeded = seed(
            agents=[("gpu-1", BIG_POOL), ("gpu-2", SMALL_POOL)],
            here=here, folder=tmp_path / "demo", bounds=Bounds(1_000, 100), now=timezone.now(),
        )  # fmt: skip
        return set(seeded.enrolment_tokens), seeded.enrolled

    factories.installation()
    assert again({}) == ({"gpu-1", "gpu-2"}, {})
    kept, lost = (
        factories.agent(Pool.objects.get(slug=pool), name)
        for name, pool in (("gpu-1", BIG_POOL), ("gpu-2", SMALL_POOL))
    )
    here = {"gpu-1": str(kept.uuid), "gpu-2": str(lost.uuid)}
    assert again(here) == (set(), here)
    assert again(None) == (set(), here), "nobody looked at folders"
    assert again({"gpu-1": str(kept.uuid)}) == ({"gpu-2"}, {"gpu-1": str(kept.uuid)})
    assert Agent.objects.get(pk=lost.pk).state == Agent.State.RETIRED
    assert again({"gpu-1": "another database's"})[0] == {"gpu-1", "gpu-2"}
