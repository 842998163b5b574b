"""A pytest plugin that is loaded first: a throwaway PostgreSQL and Valkey for the run, before Django reads settings.

With `DATABASE_URL` (and `REDIS_URL`) in the environment the run uses those servers instead.
"""

import atexit
import os
import secrets
from urllib.parse import urlsplit, urlunsplit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
os.environ.setdefault("FLEXBAND_SECRET_KEY", secrets.token_urlsafe(50))
os.environ.setdefault("FLEXBAND_INSECURE_LOOPBACK", "true")
os.environ["FLEXBAND_AS_OWNER"] = "true"

if "DATABASE_URL" not in os.environ or "REDIS_URL" not in os.environ:
    from controlplane.embedded.throwaway import throwaway_servers

    _context = throwaway_servers()
    _servers = _context.__enter__()
    atexit.register(_context.__exit__, None, None, None)
    os.environ.setdefault("DATABASE_URL", _servers.postgres.owner_dsn)
    os.environ.setdefault("REDIS_URL", _servers.valkey.url)

# Parallel workers share the servers, each with a database of its own (pytest-django) and a number of its own in Valkey.
if worker := os.environ.get("PYTEST_XDIST_WORKER", ""):
    address = urlsplit(os.environ["REDIS_URL"])
    os.environ["REDIS_URL"] = urlunsplit(address._replace(path=f"/{int(worker.removeprefix('gw')) + 1}"))
