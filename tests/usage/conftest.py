import pytest
from django.db import connection

from controlplane.exchange.database import close_pools
from controlplane.exchange.database import connection as exchange_connection
from tests.world import build_world


@pytest.fixture
def world(transactional_db):
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE usage_record")
    yield build_world()
    close_pools()


@pytest.fixture
def in_transaction():
    def run(function, *arguments, **named):
        with exchange_connection() as held, held.transaction(), held.cursor() as cursor:
            return function(cursor, *arguments, **named)

    return run
