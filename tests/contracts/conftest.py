"""Shared by the tests of classes and contracts."""

import pytest


@pytest.fixture(autouse=True)
def quick_passwords(settings):
    """Nobody signs in with a password here: a slow hash would be most of the time of these tests."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
