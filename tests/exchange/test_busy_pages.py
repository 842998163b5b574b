"""Reports and pages share neither threads nor connections: pages that take all of theirs hold up no report."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from controlplane.exchange import database
from controlplane.usage.models import UsageRecord
from tests.usage_rows import usage_row

PAGES = 32
REPORTS = 10
WAIT_S = 60


class BusyPages:
    """`PAGES` page views that each hold a thread and a connection in a transaction until they are let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.held = threading.Barrier(PAGES + 1)
        self.threads = ThreadPoolExecutor(PAGES, thread_name_prefix="page")

    def _view(self) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT count(*) FROM usage_record")
                self.held.wait(WAIT_S)
                self.let_go.wait(WAIT_S)
                cursor.execute("ROLLBACK")
        finally:
            connection.close()

    def __enter__(self) -> BusyPages:
        self.views = [self.threads.submit(self._view) for _ in range(PAGES)]
        self.held.wait(WAIT_S)
        return self

    def __exit__(self, *_) -> None:
        self.let_go.set()
        for view in self.views:
            view.result(WAIT_S)
        self.threads.shutdown()


async def report(agent, world) -> None:
    """Some reports, one after the other."""
    for _ in range(REPORTS):
        await asyncio.wait_for(agent.report(records=[usage_row(world, prices=world.prices)]), WAIT_S)


async def test_reports_are_taken_while_pages_hold_every_thread_and_connection(agent, world):
    """Ingest does not share its connections with the pages."""
    loop = asyncio.get_running_loop()
    busy = await loop.run_in_executor(None, BusyPages().__enter__)
    stuck = threading.Event()
    # the event loop's own threads, which pages of an ASGI server may use, are taken as well
    taken = [loop.run_in_executor(None, stuck.wait, WAIT_S) for _ in range(64)]
    try:
        await report(agent, world)
        assert not any(view.done() for view in busy.views), "every report came while every page was still held"
    finally:
        stuck.set()
        await asyncio.gather(*taken)
        await loop.run_in_executor(None, busy.__exit__, None, None, None)
    assert await sync_to_async(UsageRecord.objects.count)() == REPORTS


@pytest.mark.django_db(transaction=True)
def test_connections_of_the_exchange_are_named_and_bounded_apart_from_those_of_pages(world):
    with database.connection() as held:
        (name,) = held.execute("SELECT current_setting('application_name')").fetchone()
        theirs = held.info.backend_pid
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        assert cursor.fetchone()[0] != theirs and name == "flexband-exchange"
    assert database._pool().max_size == database.POOL_MAX
