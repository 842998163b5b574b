#!/usr/bin/env python
"""Flexband's commands: `manage.py help` lists them."""

import os
import sys

from django.core.management import execute_from_command_line
from django.core.management.base import CommandParser
from django.db import OperationalError


class UsageOnRequest:
    """Leaves out what argparse writes above each error, a dozen lines of usage; `--help` shows it to those who ask."""

    def print_usage(self, file=None):
        if file is not sys.stderr:
            super(CommandParser, self).print_usage(file)


if __name__ == "__main__":
    CommandParser.print_usage = UsageOnRequest.print_usage
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")
    try:
        execute_from_command_line(sys.argv)
    except OperationalError as error:
        if getattr(error.__cause__, "sqlstate", None) is not None:
            raise  # a server that answers
        reason = str(error).strip().splitlines()[0]
        sys.exit(f"error: the database cannot be reached ({reason}). `manage.py doctor` says what is configured.")
