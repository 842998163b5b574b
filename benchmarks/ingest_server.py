"""The agents' door alone, for the benchmark: the same application that the web process mounts.

BENCHMARK_WITHOUT_ROLLUPS=1 stores records without their rollups: what these cost is the difference.
"""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django

django.setup()

from controlplane.core.period import to_us  # noqa: E402 - needs the app registry
from controlplane.exchange.asgi import ExchangeApplication  # noqa: E402 - needs the app registry
from controlplane.exchange.collector import spare_reports  # noqa: E402 - needs the app registry
from controlplane.exchange.protocol import ReportProtocol  # noqa: E402 - needs the app registry
from controlplane.usage import ingest  # noqa: E402 - needs the app registry
from controlplane.usage.records import COPY_SQL, to_copy  # noqa: E402 - needs the app registry


async def _nothing(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def _store_records_only(cursor, records, now):
    with cursor.copy(COPY_SQL) as copy:
        copy.write(to_copy(records, to_us(now)))


if os.environ.get("BENCHMARK_WITHOUT_ROLLUPS"):
    ingest.store_records = _store_records_only

application = ExchangeApplication(fallback=_nothing)


class HttpProtocol(ReportProtocol):
    exchange = application


spare_reports()
