"""Contended actions: the same work in several threads that begin together, each with a connection of its own."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from django.db import connections

Answer = TypeVar("Answer")


def at_once(works: Sequence[Callable[[], Answer]], *, within_s: float = 60) -> list[Answer]:
    """Runs all of them and returns their answers in the order they came; fails with the first exception of any."""
    answers: list[Answer] = []
    errors: list[Exception] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Answer]) -> None:
        try:
            barrier.wait(60)
            answers.append(work())
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"still at work after {within_s} s"
    return answers
