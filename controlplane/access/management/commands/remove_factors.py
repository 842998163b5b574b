"""The way back in for an administrator whose phone is lost and who has nobody to ask."""

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.access.session_actions import remove_factors
from controlplane.audit.actors import command_actor


class Command(BaseCommand):
    help = "Removes the second factors of a person and ends the person's sessions; the password stays."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="sign-in name")
        parser.add_argument("--reason", required=True, help="kept in the audit log")

    def handle(self, *args: Any, **options: Any) -> None:
        user = get_user_model().objects.filter(username__iexact=options["name"]).first()
        if user is None:
            raise CommandError(f"nobody signs in as {options['name']}")
        removed = remove_factors(user=user, actor=command_actor(), now=timezone.now(), reason=options["reason"])
        self.stdout.write(f"removed {removed} of {user.username}; all sessions ended" if removed else "there was none")
