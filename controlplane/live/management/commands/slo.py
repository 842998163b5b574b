"""`manage.py slo --contract NAME --from T --to T`: a contract judged over a span of time, from exact counts."""

import json
from argparse import ArgumentParser
from datetime import UTC, datetime, timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from controlplane.contracts.models import Contract
from controlplane.contracts.queries import standings, version_at
from controlplane.live import contracts, deadlines
from controlplane.live.api import night_json


def instant(text: str) -> datetime:
    """ISO 8601; a time without a zone is UTC. Raises CommandError with status 2."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"{text!r} is not a time: write 2026-11-29T14:00 or 2026-11-29T14:00+01:00", returncode=2
        ) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


class Command(BaseCommand):
    help = "Judges a contract between two instants: three populations, out of range, unknown, interval, burn."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--contract", required=True, metavar="NAME", help="the contract's slug")
        parser.add_argument("--from", dest="since", metavar="T", help="first instant (default: the contract's window)")
        parser.add_argument("--to", dest="until", metavar="T", help="end, not included (default: now)")
        parser.add_argument("--json", action="store_true", help="print JSON")

    def handle(self, *, contract: str, since: str | None, until: str | None, json: bool, **_: Any) -> None:
        row = Contract.objects.select_related("workload_class", "tenant").filter(slug=contract).first()
        if row is None:
            raise CommandError(f"there is no contract {contract!r}: manage.py policy export lists them", returncode=2)
        end = instant(until) if until else timezone.now()
        version = version_at(row, end)
        if version is None:
            raise CommandError(f"no version of {contract} is in force at {end.isoformat()}", returncode=2)
        if version.objective == "deadline":
            self._print(night_json(row, deadlines.evaluate(standings([row], end), end)[row.pk]), json)
            return
        begin = instant(since) if since else end - timedelta(seconds=version.window_s)
        if begin >= end:
            raise CommandError("--from must lie before --to", returncode=2)
        self._print(contracts.as_json(contracts.evaluate_range(row, version, begin, end)), json)

    def _print(self, said: dict[str, Any], as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps(said))
            return
        reason = f" ({said['unknown_reason']})" if said["unknown_reason"] else ""
        self.stdout.write(f"{said['contract']} version {said['version']}: {said['verdict']}{reason}")
        for name, row in said.get("populations", {}).items():
            share = "—" if row["compliance"] is None else f"{row['compliance'] * 100:.4f} %"
            between = (
                ""
                if row["interval"] is None
                else f"  95 % between {row['interval'][0]:.4%} and {row['interval'][1]:.4%}"
            )
            self.stdout.write(f"  {name:<10} {row['good']} of {row['total']} good  {share}  {row['verdict']}{between}")
        if "minutes_out_of_range" in said:
            self.stdout.write(
                f"  {said['minutes_in_range']} minutes in range, {said['minutes_out_of_range']} out of range"
                f" ({said['offered_out_of_range']} requests), {said['neutral']} neutral, {said['running']} running"
            )
        else:
            self.stdout.write(
                f"  {said['finished_in_time']} of {said['jobs']} jobs finished in time, due {said['due']}"
            )
