"""Unsafe settings are told by id; safe ones are quiet."""

from controlplane.operations.checks import plain_http_is_for_loopback, secret_key_is_set


def test_a_missing_secret_key_is_an_error_of_the_deploy_checks(settings):
    settings.SECRET_KEY_IS_SET = False
    assert [message.id for message in secret_key_is_set(None)] == ["flexband.E001"]
    settings.SECRET_KEY_IS_SET = True
    assert secret_key_is_set(None) == []


def test_plain_http_beyond_loopback_is_warned_of(settings):
    settings.INSECURE_LOOPBACK, settings.ALLOWED_HOSTS = True, ["127.0.0.1", "flexband.example"]
    assert [message.id for message in plain_http_is_for_loopback(None)] == ["flexband.W002"]
    settings.ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
    assert plain_http_is_for_loopback(None) == []
