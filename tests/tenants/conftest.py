"""A tenant with two classes, and the person who acts."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection

from controlplane.audit.actors import Actor
from tests import factories

ADMIN = Actor(id=None, name="ada", role="admin", request_id="r-1")


@pytest.fixture
def actor() -> Actor:
    return ADMIN


@pytest.fixture
def acme(installation):
    return factories.tenant("acme")


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """Runs calls in threads of their own, started together; an exception is returned in its place."""
    start, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            start.wait(timeout=60)
            results[index] = call()
        except Exception as error:
            results[index] = error
        finally:
            connection.close()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results
