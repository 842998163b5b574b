"""Commands that meet a file or an instant nobody expects say so in a line."""

from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from controlplane.fleet.models import AgentLive
from controlplane.operations.health import _agents
from tests import factories


def test_a_file_that_is_nested_without_end_is_refused_in_a_line(tmp_path):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(CommandError, match="nested too deeply") as raised:
        call_command("explain", "flex", str(file))
    assert raised.value.returncode == 2


@pytest.mark.django_db
def test_an_agent_that_reports_while_the_doctor_looks_reported_just_now():
    factories.installation()
    agent = factories.agent(factories.pool())
    later = factories.NOW + timedelta(seconds=4)
    AgentLive.objects.create(agent=agent, epoch=1, seq=1, reported_at=later, revision=0, live_number=0)
    (finding,) = _agents(factories.NOW)
    assert (finding.right, finding.detail) == (True, "reported 0.0 s ago")
