"""What a production environment is told: the deploy checks and the REST schema, in processes of their own."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNSAFE_HERE = ("FLEXBAND_INSECURE_LOOPBACK", "FLEXBAND_DEBUG", "FLEXBAND_SECRET_KEY_FILE", "DJANGO_SETTINGS_MODULE")


def manage(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`manage.py` as an operator runs it; no database is asked."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSAFE_HERE}
    production = {
        "FLEXBAND_SECRET_KEY": secrets.token_urlsafe(50),
        "FLEXBAND_ALLOWED_HOSTS": "flexband.example",
        "DATABASE_URL": "postgresql://flexband@database.example:5432/flexband",
    }
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env={**kept, **production, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_deploy_checks_find_nothing_in_a_production_environment():
    checked = manage("check", "--deploy", "--fail-level", "WARNING")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "no issues" in checked.stdout


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"FLEXBAND_SECRET_KEY": ""}, "flexband.E001"),
        ({"FLEXBAND_INSECURE_LOOPBACK": "1"}, "flexband.W002"),
        ({"FLEXBAND_DEBUG": "1"}, "security.W018"),
    ],
)
def test_the_deploy_checks_name_what_is_unsafe(environment: dict[str, str], told: str):
    checked = manage("check", "--deploy", "--fail-level", "WARNING", **environment)
    assert checked.returncode == 1
    assert told in checked.stderr


def test_the_rest_schema_is_valid_and_names_everything():
    made = manage("spectacular", "--validate", "--fail-on-warn")
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.startswith("openapi: 3.1.0")
