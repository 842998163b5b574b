"""The agents' door alone, for the benchmark: the same application that the web process mounts.

BENCHMARK_WITHOUT_ROLLUPS=1 stores records without their rollups: what these cost is the difference.
BENCHMARK_EAGER=1 validates each report by itself when it comes, not all of a transaction together.
"""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django

django.setup()

import numpy as np  # noqa: E402 - needs the app registry

from controlplane.exchange import checking, handlers  # noqa: E402 - needs the app registry
from controlplane.exchange.asgi import ExchangeApplication  # noqa: E402 - needs the app registry
from controlplane.exchange.catalogue import catalogue  # noqa: E402 - needs the app registry
from controlplane.exchange.collector import spare_reports  # noqa: E402 - needs the app registry
from controlplane.exchange.database import connection  # noqa: E402 - needs the app registry
from controlplane.exchange.protocol import ReportProtocol  # noqa: E402 - needs the app registry
from controlplane.usage import ingest  # noqa: E402 - needs the app registry
from controlplane.usage.validation import Bounds, find_faults  # noqa: E402 - needs the app registry


async def _nothing(scope, receive, send):
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


if os.environ.get("BENCHMARK_WITHOUT_ROLLUPS"):
    ingest.store_records = ingest.copy_records


def _validated(*given):
    """The report, after every check of its records; what exists is read once, not every few seconds."""
    incoming = _incoming_of(*given)
    if not _known:
        with connection() as held, held.cursor() as cursor:
            _known.append(catalogue.known(cursor, set()))
    read = checking.read_records([incoming])
    bounds = Bounds.at(incoming.received_us, spool_age_us=14 * 86_400_000_000)
    if find_faults(read.records, _known[0], bounds).any():
        raise SystemExit("a record of the benchmark has a fault")
    return incoming


_known: list = []
_incoming_of = handlers.incoming_of
if os.environ.get("BENCHMARK_EAGER"):
    handlers.incoming_of = _validated
    checking.find_faults = lambda records, known, bounds: np.zeros(len(records), dtype=np.int8)

application = ExchangeApplication(fallback=_nothing)


class HttpProtocol(ReportProtocol):
    exchange = application


spare_reports()
