import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection

from controlplane.budgets import divisions
from controlplane.exchange.asgi import ExchangeApplication
from controlplane.exchange.catalogue import catalogue
from controlplane.exchange.database import close_pools
from tests.exchange.door import TestAgent, ended, nowhere
from tests.world import build_world


@pytest.fixture
def world(transactional_db, monkeypatch):
    catalogue.forget()
    # limits are kept for a second: those of the test before would be answered
    monkeypatch.setattr(divisions, "_shares", divisions.Shares())
    with connection.cursor() as cursor:
        # partitioned and written by COPY alone, so it is outside Django's flush
        cursor.execute("TRUNCATE usage_record")
    yield build_world()
    close_pools()


@pytest.fixture
def process(world):
    """Makes processes of the control plane; each of their threads has a connection of its own until it ends."""
    made = []

    def make() -> ExchangeApplication:
        made.append(ExchangeApplication(fallback=nowhere))
        return made[-1]

    yield make
    for one in made:
        ended(one)


@pytest.fixture
def app(process):
    return process()


@pytest_asyncio.fixture
async def agent(app, world):
    """An enrolled agent that has said hello."""
    one = TestAgent(app)
    response = await one.enrol(await sync_to_async(world.token)())
    assert response.status == 200, response.body
    await one.hello()
    return one
