"""Live pages: first paint from rows alone, empty, stale and lost states, roles and the doors to requests."""

import pytest
from django.urls import reverse

from tests import factories

pytestmark = pytest.mark.django_db


def body(client, name, *args, **query):
    answer = client.get(reverse(name, args=args), query)
    assert answer.status_code == 200, answer.status_code
    return answer.content.decode()


@pytest.fixture
def oncall(scene):
    return factories.person("oncall")


def test_home_says_what_burns_and_which_stage_takes_the_time(scene, oncall):
    page = body(oncall, "home")
    assert "<title>(1 breached) Live" in page
    assert "favicon-bad.svg" in page
    assert "chat · TTFT" in page and "is burning" in page
    assert ">Queue</span> takes" in page


def test_pool_page_paints(scene, oncall):
    page = body(oncall, "pool", "chat-70b")
    assert "Queue takes" in page and "Recall f2" in page
