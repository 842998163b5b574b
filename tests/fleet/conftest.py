"""A pool with eight slots made through the actions, and its classes."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.audit.actors import Actor
from controlplane.fleet import actions
from tests import factories

ADA = Actor(id=None, name="ada", role="admin")


@pytest.fixture(autouse=True)
def quick_passwords(settings):
    """Nobody signs in with a password here: a slow hash would be most of the time of these tests."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture
def fleet(installation):
    """The pool `chat` with two interactive floor slots, one batch floor slot and one flex slot."""
    now = timezone.now() - timedelta(days=1)
    factories.workload_class("chat")
    factories.workload_class("bulk", "batch")
    values = {
        "gpu_type": "H100", "interactive_class": "chat", "batch_class": "bulk", "name": "Chat",
        "safe_rate": {"entries": {"2": 8.0, "3": 12.0}},
    }  # fmt: skip
    row = actions.create_pool(slug="chat", model="llama-70b", values=values, actor=ADA, now=now)
    for band, names in (("interactive", ["i1", "i2"]), ("batch", ["b1"]), ("flex", ["f1"])):
        actions.add_slots(pool_slug="chat", names=names, band=band, actor=ADA, now=now)
    return row
