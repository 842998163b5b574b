"""`python -m tests.chaos`: see `many_nights`. The nights have servers of their own; only the settings are read here."""

import os
import secrets
import sys

import django

from tests.e2e.demo_run import SERVERS

for name in SERVERS:
    os.environ.pop(name, None)
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
os.environ.setdefault("FLEXBAND_SECRET_KEY", secrets.token_urlsafe(50))
os.environ.setdefault("FLEXBAND_INSECURE_LOOPBACK", "true")
os.environ.setdefault("FLEXBAND_LOG_LEVEL", "WARNING")  # or clients tell of every request
django.setup()

from controlplane.supervisor.supervisor import StopRequested, SupervisorError  # noqa: E402 - after the settings
from tests.chaos.many_nights import main  # noqa: E402

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (AssertionError, SupervisorError) as error:
        sys.exit(f"chaos: {error}")
    except (KeyboardInterrupt, StopRequested):
        sys.exit("chaos: stopped; the next start goes on with the night that was cut off")
