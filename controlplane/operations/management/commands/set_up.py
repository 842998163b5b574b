"""`manage.py set_up`: the first start of an installation on servers of the operator's own; safe to run again."""

import json
import os
from argparse import ArgumentParser
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.operations.setting_up import ensure_roles, set_up


class Command(BaseCommand):
    help = "Makes database roles and schema, the installation's row and the first administrator; run it as the owner."
    requires_migrations_checks = False
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--name", default="Flexband", help="the organisation's name")
        parser.add_argument("--billing-zone", default="UTC", help="time zone of billing periods, such as Europe/Berlin")
        parser.add_argument("--currency", default="EUR")
        parser.add_argument("--administrator", help="sign-in name of the first administrator")
        parser.add_argument("--app-password", help="makes the database role `app` with this password")
        parser.add_argument("--reader-password", help="makes the database role `reader` with this password")
        parser.add_argument("--json", action="store_true")

    def handle(self, **options: Any) -> None:
        try:
            ZoneInfo(options["billing_zone"])
        except (ZoneInfoNotFoundError, ValueError) as error:
            raise CommandError(f"{options['billing_zone']} is not a time zone", returncode=2) from error
        ensure_roles(app_password=options["app_password"], reader_password=options["reader_password"])
        try:
            made = set_up(
                name=options["name"],
                billing_zone=options["billing_zone"],
                currency=options["currency"],
                administrator=options["administrator"],
                password=os.environ.get("FLEXBAND_ADMIN_PASSWORD"),
                now=timezone.now(),
            )
        except ValidationError as error:
            raise CommandError(
                "set FLEXBAND_ADMIN_PASSWORD to the administrator's first password", returncode=2
            ) from error
        if options["json"]:
            self.stdout.write(json.dumps({"installation": made.installation, "administrator": made.administrator}))
        else:
            self.stdout.write(f"installation {made.installation} is set up")
