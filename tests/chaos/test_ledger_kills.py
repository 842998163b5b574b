"""kill -9 of processes that post and fold at random points: no event is lost, doubled or cut in half."""

import os
import random
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
from django.conf import settings
from django.db import connection

from controlplane.ledger.balance_sums import fold_balances
from controlplane.ledger.models import BalanceFold, LedgerEvent, Transfer
from controlplane.ledger.posting import trial_balance
from tests import factories
from tests.chaos.ledger_poster import lines_of, post_event

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EVENTS, ROUNDS, AT_ONCE, SEED = 400, 4, 3, 20_261_129


def start(folder: Path, seed: int) -> tuple[subprocess.Popen[bytes], Path]:
    address = urlsplit(os.environ["DATABASE_URL"])
    environment = {
        **os.environ,
        "DATABASE_URL": urlunsplit(address._replace(path=f"/{connection.settings_dict['NAME']}")),
        "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
        "FLEXBAND_SIGNING_KEYS": str(settings.SIGNING_KEY_DIR),
        "FLEXBAND_VAR_DIR": str(folder),
    }
    log = folder / f"poster-{seed}.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "tests.chaos.ledger_poster", str(seed), str(EVENTS)]
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], env=environment, stdout=out, stderr=out), log


def begun(log: Path, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while b"begins" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def test_killed_posters_lose_no_event_and_double_none(transactional_db, tmp_path, capsys):
    factories.installation()
    chance, said, killed, at_work = random.Random(SEED), set(), 0, 0
    for round_ in range(ROUNDS):
        posters = [start(tmp_path, round_ * AT_ONCE + number) for number in range(AT_ONCE)]
        try:
            for poster, log in posters:
                begun(log)
                time.sleep(chance.uniform(0.02, 0.3))
                poster.kill()
                poster.wait()
                killed += 1
                at_work += b"done" not in log.read_bytes()
        finally:
            for poster, _ in posters:
                poster.kill()
                poster.wait()
        for _, log in posters:
            said |= {int(line) for line in log.read_text().splitlines() if line.isdigit()}
            assert "Traceback" not in log.read_text(), log.read_text()
        check(said)
    posted = LedgerEvent.objects.count()
    for number in range(EVENTS):
        post_event(number)
    check(set(range(EVENTS)))
    with capsys.disabled():
        print(
            f"\n  {killed} kills, {at_work} while posting: {posted} of {EVENTS} events whole, {len(said)} of them told"
        )
    assert posted and at_work >= ROUNDS, "the kills hit posters at work"


def check(at_least: set[int]) -> None:
    """Every event is whole and there once, those that were told of among them; folded sums are the plain ones."""
    keys = {int(key.split(":")[1]): pk for pk, key in LedgerEvent.objects.values_list("id", "key")}
    assert at_least <= set(keys), f"lost: {sorted(at_least - set(keys))[:5]}"
    rows = Transfer.objects.values_list("event_id", "debit__code", "credit__code", "amount_nanos")
    found = Counter(rows)
    wanted = Counter(
        (pk, f"tenant:t{tenant}:chat:direct", f"fleet:pool-{number % 3}", nanos)
        for number, pk in keys.items()
        for tenant, nanos in lines_of(number)
    )
    assert found == wanted, "an event is cut in half or doubled"
    while fold_balances(datetime.now(UTC)):
        pass
    folded = {row.code: row.balance_nanos for row in trial_balance().rows}
    plain: Counter[str] = Counter()
    for _, debit, credit, nanos in rows:
        plain[debit] += nanos
        plain[credit] -= nanos
    assert folded == dict(plain) and trial_balance().balanced
    assert BalanceFold.objects.get().through_id <= (Transfer.objects.order_by("-id").first() or Transfer(id=0)).id
