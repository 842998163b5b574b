"""Closing a month: what is checked, what is kept for ever, and where everything goes that comes afterwards."""

import hashlib
import json
import threading
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection

from controlplane.audit.actors import Actor
from controlplane.audit.models import AuditEntry
from controlplane.fleet.models import SlotTenure
from controlplane.ledger import proposals, rates
from controlplane.ledger.attribution import attribute
from controlplane.ledger.charging import post_charges
from controlplane.ledger.closing_checks import UnpricedUse, checklist
from controlplane.ledger.export_files import FORMATS
from controlplane.ledger.exports import export_file
from controlplane.ledger.models import (
    AttributionInterval,
    LedgerEvent,
    Period,
    PeriodExport,
    PeriodVersion,
    PoolSku,
    StatementIssue,
)
from controlplane.ledger.periods import close_period, reopen_period, settle_closed, verify_exports
from controlplane.ledger.posting import PostingLine, balances, fleet_account, owner_account, post, trial_balance
from controlplane.ledger.reconciliation import month_window
from controlplane.usage.models import AuditedHour, DuplicateRecord, Quarantine, RollupDelta, SlotMinute
from controlplane.usage.partitions import create_days
from tests import factories
from tests.ledger.fleet_rows import HOUR, ONE_HOUR, worked_example
from tests.ledger.test_bridge import HEADER
from tests.ledger.test_hour_requests import record
from tests.ledger.test_pages import roll_up
from tests.threads import at_once

FIN = Actor(id=None, name="fin", role="finance")
BOSS = Actor(id=None, name="boss", role="finance")
NOW = datetime(2026, 12, 2, 9, 0, tzinfo=UTC)
MONTH = "2026-11"
INVOICE = HEADER + "\n20,20,EUR,Usage,GPU,2026-11-20 10:00:00,chat-70b,8,own,here\n"


def exported(period=MONTH):
    return {row.file_name: (row.sha256, bytes(row.content)) for row in PeriodExport.objects.order_by("id")}


@pytest.fixture
def fleet(db, tmp_path):
    """Eight slots that were in the fleet for one hour of November, attributed, charged and invoiced."""
    return november(tmp_path)


def november(tmp_path):
    made = worked_example()
    SlotTenure.objects.update(ended_at=HOUR + ONE_HOUR)
    attribute(made.pool, HOUR, HOUR + ONE_HOUR, HOUR + 2 * ONE_HOUR)
    roll_up(made, "a", "chat", nanos=(9_000_000_001, 250_000_000, 3_000_000_000, 0))
    roll_up(made, "c", "bulk", nanos=(5_000_000, 0, 0, 0))
    path = tmp_path / "own.csv"
    path.write_text(INVOICE)
    call_command("import_invoice", str(path), "--period", MONTH, "--json")
    return made


def close(reason="", now=NOW, actor=FIN):
    return close_period(MONTH, actor=actor, now=now, reason=reason)


def match(pool):
    return PoolSku.objects.create(pool=pool, sku="chat-70b", updated_at=NOW, updated_by="fin")


def test_a_month_in_order_closes_without_a_reason(fleet):
    match(fleet.pool)
    found = checklist(MONTH, now=NOW)
    assert {check.name: check.state for check in found.checks} == dict.fromkeys(
        [
            "gaps",
            "meters",
            "quarantine",
            "duplicates",
            "behind",
            "unposted",
            "unpriced",
            "unpriced_requests",
            "unreconciled",
            "bridge",
            "late_invoices",
            "proposals",
        ],
        "ok",
    )
    done = close()
    assert not done.repeated and done.version.version == 1 and done.version.reason == ""
    assert done.version.cost_nanos == 20 * 10**9 and done.version.charge_nanos == 12_255_000_001
    assert done.version.methods == [{"pool": "chat-70b", "method": "usage", "until": "2026-11-20T11:00:00+00:00"}]
    assert balances(MONTH)["billed:a:chat"] == 12_250_000_001
    entry = AuditEntry.objects.get(action="period.close")
    assert entry.after["version"] == 1 and set(entry.after["exports"]) == {"csv", "xlsx", "parquet", "focus"}


def test_open_checks_are_named_and_need_a_reason(fleet):
    SlotMinute.objects.filter(minute=HOUR).delete()
    Quarantine.objects.create(
        at=HOUR, agent_id=1, epoch=1, seq=9, reason="reports_lost", records=3,
        payload={"first_seq": 7, "last_seq": 9, "records": 3},
    )  # fmt: skip
    roll_up(fleet, "b", "chat", model=RollupDelta)
    proposals.propose_credit_note(
        period=MONTH, tenant="a", class_="chat", amount_nanos=1, actor=FIN, now=NOW, reason="x"
    )
    SlotTenure.objects.update(ended_at=HOUR + 3 * ONE_HOUR)
    states = {check.name: (check.state, check.word) for check in checklist(MONTH, now=NOW).checks}
    assert states["gaps"] == ("risk", "1 gap") and states["quarantine"] == ("risk", "3 records")
    assert states["meters"][0] == "unknown" and states["behind"] == ("risk", "1 waiting")
    assert states["unposted"] == ("risk", "2 hours") and states["proposals"] == ("risk", "1 proposal")
    assert states["unreconciled"][0] == "ok" or states["unreconciled"][1] == "0.00"
    with pytest.raises(ValidationError, match="gaps in agents’ reports, requests against meters, quarantine"):
        close()
    assert not Period.objects.exists() and not LedgerEvent.objects.filter(kind="charges").exists()
    done = close(reason="The gap is known; its slot was repaired.")
    assert done.version.reason.startswith("The gap is known")


def test_requests_without_a_rate_card_keep_a_month_from_closing_without_a_reason(fleet):
    match(fleet.pool)
    roll_up(fleet, "b", "chat", requests=7, nanos=(0, 0, 0, 0))
    roll_up(fleet, "b", "bulk", requests=2, nanos=(0, 0, 0, 0), model=RollupDelta)
    roll_up(fleet, "b", "bulk", requests=40, nanos=(0, 0, 0, 0), version=3, at=HOUR + ONE_HOUR)  # a card of zeros
    found = {check.name: check for check in checklist(MONTH, now=HOUR + timedelta(minutes=1)).checks}
    check = found["unpriced_requests"]
    assert (check.state, check.word) == ("unknown", "9 requests")
    assert "chat on llama-70b of b and 1 more" in check.text
    assert check.unpriced == (UnpricedUse("b", "chat", "llama-70b", 7), UnpricedUse("b", "bulk", "llama-70b", 2))
    with pytest.raises(ValidationError, match="unpriced requests"):
        close()
    version = close(reason="a trial, given away").version
    assert version.version == 1
    (kept,) = [check["unpriced"] for check in version.checklist if check["name"] == "unpriced_requests"]
    assert kept[0] == {"tenant": "b", "workload_class": "chat", "model": "llama-70b", "requests": 7}


def copied(ended_at, nanos):
    return DuplicateRecord.objects.create(
        request_id=uuid.uuid4(), attempt=1, hour=HOUR, found_at=NOW, copies=2, agent_ids=[1, 2], same_content=True,
        first_received_at=ended_at, ended_at=ended_at, pool_id=1, tenant_id=1, class_id=1, model_id=1, rate_version=1,
        outcome=1, prompt_tokens=1, cached_tokens=0, output_tokens=1, gpu_us=1, charge_prompt_nanos=nanos,
        charge_cached_nanos=0, charge_output_nanos=nanos, charge_gpu_nanos=0,
    )  # fmt: skip


def duplicates_check(now=NOW):
    return next(check for check in checklist(MONTH, now=now).checks if check.name == "duplicates")


def test_what_was_counted_twice_is_in_the_checklist_of_its_month(fleet):
    copied(HOUR, 2_500_000_000)
    copied(datetime(2026, 10, 31, 12, tzinfo=UTC), 10**9)
    found = duplicates_check()
    assert (found.state, found.word) == ("risk", "1 attempt") and "5.00 too much" in found.text
    with pytest.raises(ValidationError, match="counted twice"):
        close()


def test_copies_that_nobody_looked_for_are_unknown(fleet):
    last = datetime(2026, 11, 30, 23, tzinfo=UTC)
    with connection.cursor() as cursor:
        create_days(cursor, [last.date()])
    record(fleet, 1, "a", at=last + timedelta(minutes=5))
    assert duplicates_check(last + timedelta(minutes=70)).state == "ok", "the audit of this hour is still under way"
    assert duplicates_check().state == "unknown"
    AuditedHour.objects.create(hour=last, records=1, duplicates=0, audited_at=NOW)
    assert duplicates_check().state == "ok"


def test_a_running_month_owes_no_hour_that_has_not_begun(fleet):
    SlotTenure.objects.update(ended_at=None)
    states = {check.name: (check.state, check.word) for check in checklist(MONTH, now=HOUR + 3 * ONE_HOUR).checks}
    assert states["unposted"] == ("risk", "2 hours")


def test_a_month_without_an_invoice_has_no_bridge_that_closes(fleet):
    states = {check.name: (check.state, check.word) for check in checklist("2026-10", now=NOW).checks}
    assert states["bridge"] == states["unreconciled"] == ("unknown", "No invoice")


@pytest.mark.parametrize("period", ["2026-12", "2027-03"])
def test_a_month_that_has_not_ended_is_not_closed(fleet, period):
    with pytest.raises(ValidationError, match="has not ended in UTC"):
        close_period(period, actor=FIN, now=NOW, reason="early")


def test_a_month_before_the_installation_is_refused_and_one_of_earlier_invoices_is_not(fleet, tmp_path):
    """A provider's bill may be older than the first slot: its month has something to close, and those after it."""
    with pytest.raises(ValidationError, match="nothing of this installation yet in 1999-05"):
        close_period("1999-05", actor=FIN, now=NOW, reason="tidy")
    assert not Period.objects.exists()
    path = tmp_path / "earlier.csv"
    path.write_text(INVOICE.replace("2026-11", "1999-05"))
    call_command("import_invoice", str(path), "--period", "1999-05", "--json")
    with pytest.raises(ValidationError, match="nothing of this installation yet in 1999-04"):
        close_period("1999-04", actor=FIN, now=NOW, reason="tidy")
    for period in ("1999-05", "1999-06"):
        assert close_period(period, actor=FIN, now=NOW, reason="the bill came first").version.version == 1


def test_closing_again_changes_nothing(fleet):
    first = close(reason="fine")
    before = exported()
    for later in range(1, 5):
        again = close(reason="again", now=NOW + timedelta(minutes=later))
        assert again.repeated and again.version.pk == first.version.pk
    assert exported() == before and StatementIssue.objects.count() == 3
    assert AuditEntry.objects.filter(action="period.close").count() == 1


@pytest.mark.django_db(transaction=True)
def test_one_of_many_who_close_at_once(tmp_path):
    november(tmp_path)
    done = at_once([lambda: close(reason="together")] * 4)
    assert sorted(one.repeated for one in done) == [False, True, True, True]
    assert PeriodVersion.objects.count() == 1 and PeriodExport.objects.count() == 4


@pytest.mark.django_db(transaction=True)
def test_what_is_posted_while_a_month_closes_is_in_its_snapshot_or_in_the_next_month(tmp_path):
    made = november(tmp_path)
    barrier, failed = threading.Barrier(3), []

    def poster(name):
        try:
            barrier.wait(60)
            for number in range(40):
                post(
                    f"race:{name}:{number}", "variance",
                    [PostingLine(owner_account("a", "chat", "price_variance"), fleet_account("chat-70b"), 1)],
                    at=HOUR, now=NOW, created_by=name,
                )  # fmt: skip
        except Exception as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=poster, args=(name,)) for name in ("x", "y")]
    for thread in threads:
        thread.start()
    barrier.wait(60)
    done = close(reason="while posting")
    for thread in threads:
        thread.join(60)
    inside = LedgerEvent.objects.filter(key__startswith="race:", period=MONTH).count()
    after = LedgerEvent.objects.filter(key__startswith="race:", period="2026-12").count()
    assert not failed and inside + after == 80
    assert done.version.cost_nanos == 20 * 10**9 + inside
    assert trial_balance(MONTH).fingerprint == done.version.fingerprint
    assert made.pool.slug == "chat-70b"


def late_use(fleet):
    """A spool that arrives after the close: 60 s more of tenant b on a slot that was idle."""
    fleet.use("b2", "b", "bulk", 5_000_000, minute=HOUR)
    SlotMinute.objects.filter(slot_id=fleet.slots["b2"].pk, minute=HOUR).update(busy_us=60_000_000)


def test_a_late_record_is_an_adjustment_of_the_open_month_that_names_what_it_corrects(fleet):
    close(reason="fine")
    before, books = exported(), balances(MONTH)
    late_use(fleet)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    assert balances(MONTH) == books and exported() == before
    event = LedgerEvent.objects.latest("id")
    assert event.period == "2026-12" and event.reason == "2026-11 is closed"
    assert event.corrects.key == "attribution:chat-70b:2026-11-20T10:00:00Z#1"
    assert event.interval_start == HOUR and balances("2026-12")["tenant:b:bulk:direct"] > 0
    count = LedgerEvent.objects.count()
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    assert LedgerEvent.objects.count() == count


def test_late_charges_are_billed_in_the_open_month_once(fleet):
    close(reason="fine")
    before = exported()
    assert settle_closed(NOW) == []
    roll_up(fleet, "b", "chat", nanos=(7, 0, 0, 0))
    assert settle_closed(NOW) == ["charges:2026-11-20:llama-70b#2"] and settle_closed(NOW) == []
    event = LedgerEvent.objects.latest("id")
    assert event.period == "2026-12" and event.corrects.key == "charges:2026-11-20:llama-70b#1"
    assert balances("2026-12") == {"billed:b:chat": 7, "revenue:chat": -7}
    assert exported() == before
    late = roll_up(fleet, "b", "chat", nanos=(9, 0, 0, 0), version=3)
    assert settle_closed(NOW + timedelta(days=30)) == [] and late.pk
    window = month_window(MONTH, "UTC")
    assert post_charges(MONTH, window, now=NOW, created_by="x").key == "charges:2026-11-20:llama-70b#3"


def test_a_price_change_never_moves_a_closed_month(fleet):
    close(reason="fine")
    before, events = exported(), LedgerEvent.objects.count()
    given = {"pool_slug": "chat-70b", "nanos_per_slot_hour": 9_000_000_000, "actor": FIN, "reason": "new price"}
    with pytest.raises(ValidationError, match="2026-11 is closed"):
        rates.add_cost_rate(now=NOW, effective_from=HOUR + timedelta(minutes=1), **given)
    rates.add_cost_rate(now=NOW, effective_from=datetime(2026, 12, 1, tzinfo=UTC), **given)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    assert LedgerEvent.objects.count() == events and exported() == before
    hashed = [export_file(MONTH, "csv").content for _ in range(2)]
    assert hashed[0] == hashed[1] == before["costs-2026-11-v1.csv"][1]
    assert set(verify_exports(MONTH).values()) == {True}


def test_files_of_a_month_have_the_same_digests_before_and_after_prices_changed(fleet):
    """Those that were kept, and those that are made anew of what is stored: each price belongs to its time."""

    def made():
        return {format: hashlib.sha256(export_file(MONTH, format).content).hexdigest() for format in FORMATS}

    as_open = made()
    close(reason="fine")
    kept = made()
    start = {"effective_from": datetime(2026, 12, 1, tzinfo=UTC), "now": NOW, "actor": FIN, "reason": "dearer"}
    rates.add_cost_rate(pool_slug="chat-70b", nanos_per_slot_hour=9_000_000_000, **start)
    for class_ in ("chat", "bulk"):
        prices = {"prompt_nanos_per_mtok": 7 * 10**9, "output_nanos_per_mtok": 9 * 10**9}
        rates.add_rate_card(class_slug=class_, model="llama-70b", values=prices, **start)
    assert made() == kept and set(verify_exports(MONTH).values()) == {True}
    reopen_period(MONTH, actor=BOSS, now=NOW, reason="to look at it again")
    AttributionInterval.objects.update(input_digest="")
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    assert made() == as_open
    close(reason="fine")
    files = exported()
    assert files["costs-2026-11-v2.csv"] == files["costs-2026-11-v1.csv"] and len(files) == 2 * len(FORMATS)


def test_a_month_is_reopened_with_a_reason_and_closed_as_a_new_version(fleet):
    close(reason="fine")
    first = exported()
    with pytest.raises(ValidationError, match="Say why"):
        reopen_period(MONTH, actor=BOSS, now=NOW, reason="")
    with pytest.raises(ValidationError, match="never closed"):
        reopen_period("2026-10", actor=BOSS, now=NOW, reason="x")
    reopen_period(MONTH, actor=BOSS, now=NOW, reason="a provider's correction")
    late_use(fleet)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    assert LedgerEvent.objects.latest("id").period == MONTH
    done = close(reason="corrected", now=NOW + timedelta(days=1))
    assert done.version.version == 2 and done.version.cost_nanos == 20 * 10**9
    kept = exported()
    assert {name: kept[name] for name in first} == first and len(kept) == 8
    assert export_file(MONTH, "csv", version=1).content == first["costs-2026-11-v1.csv"][1]
    assert export_file(MONTH, "csv").name == "costs-2026-11-v2.csv"
    assert export_file(MONTH, "csv").content != export_file(MONTH, "csv", version=1).content
    numbers = list(StatementIssue.objects.filter(tenant_slug="a").order_by("id").values_list("number", "supersedes"))
    assert numbers == [(1, None), (2, 1)]
    one = PeriodVersion.objects.get(version=1)
    assert (one.reopened_by, one.reopen_reason) == ("boss", "a provider's correction")
    with pytest.raises(ValueError, match="no closing 7"):
        export_file(MONTH, "csv", version=7)


def test_what_was_adjusted_in_another_month_stays_there_after_reopening(fleet):
    close(reason="fine")
    roll_up(fleet, "b", "chat", nanos=(7, 0, 0, 0))
    settle_closed(NOW)
    late_use(fleet)
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    december = balances("2026-12")
    reopen_period(MONTH, actor=BOSS, now=NOW, reason="look again")
    attribute(fleet.pool, HOUR, HOUR + ONE_HOUR, NOW)
    done = close(reason="as it was")
    assert balances("2026-12") == december
    assert done.version.cost_nanos == 20 * 10**9 and done.version.charge_nanos == 12_255_000_001


def test_statement_numbers_have_no_gap_over_months_and_versions(fleet):
    close(reason="fine")
    for turn in range(3):
        reopen_period(MONTH, actor=BOSS, now=NOW, reason="again")
        close(reason="again", now=NOW + timedelta(hours=turn))
    for tenant in ("a", "b", "c"):
        numbers = list(
            StatementIssue.objects.filter(tenant_slug=tenant).order_by("number").values_list("number", flat=True)
        )
        assert numbers == [1, 2, 3, 4]


def test_kept_bytes_cannot_be_changed(fleet):
    close(reason="fine")
    with pytest.raises(DatabaseError, match="append-only"):
        PeriodExport.objects.update(content=b"")


def test_the_months_of_another_zone_end_by_its_clocks(fleet):
    installation = factories.installation()
    installation.billing_zone = "America/New_York"
    installation.save(update_fields=["billing_zone"])
    with pytest.raises(ValidationError, match="has not ended in America/New_York"):
        close(now=datetime(2026, 12, 1, 4, 59, 59, tzinfo=UTC), reason="early")
    assert close(now=datetime(2026, 12, 1, 5, 0, tzinfo=UTC), reason="now").version.version == 1


def test_the_commands_close_and_export(fleet, tmp_path, capsys):
    with pytest.raises(CommandError) as error:
        call_command("close_period", "2099-01")
    assert error.value.returncode == 2
    with pytest.raises(CommandError) as error:
        call_command("close_period", "November")
    assert error.value.returncode == 2
    close(reason="fine")
    call_command("close_period", MONTH, "--json")
    body = json.loads(capsys.readouterr().out)
    assert body["repeated"] and body["cost"] == "20.00" and body["charges"] == "12.255000001"
    assert all(one["intact"] for one in body["exports"].values())
    path = tmp_path / "out.csv"
    call_command("export_costs", "--period", MONTH, "--format", "csv", "--output", str(path), "--json")
    made = json.loads(capsys.readouterr().out)
    assert made["closed"] and made["sha256"] == body["exports"]["costs-2026-11-v1.csv"]["sha256"]
    with pytest.raises(CommandError) as error:
        call_command("export_costs", "--period", "never", "--format", "csv")
    assert error.value.returncode == 2


def test_a_statement_has_its_number_and_stays_as_issued(fleet):
    client = factories.person("finance", name="ines")
    open_text = client.get(f"/finance/statements/a/?period={MONTH}").content.decode()
    assert "A-000001" not in open_text and "12.25" in open_text
    close(reason="no meter on Tuesday")
    roll_up(fleet, "a", "chat", nanos=(9_000_000_000, 0, 0, 0), version=7)
    settle_closed(NOW)
    text = client.get(f"/finance/statements/a/?period={MONTH}").content.decode()
    assert "Statement A-000001, version 1" in text and "12.250000001" in text and "21.25" not in text
    assert "chat-70b: usage" in text and "no meter on Tuesday" in text
    later = client.get("/finance/statements/a/?period=2026-12").content.decode()
    assert "Late usage of 2026-11" in later and "+9.00" in later and "Charges and corrections" in later
    reopen_period(MONTH, actor=BOSS, now=NOW, reason="again")
    close(reason="second")
    text = client.get(f"/finance/statements/a/?period={MONTH}").content.decode()
    assert "Statement A-000002, version 2, in place of A-000001" in text
    assert "Billed in another month" in text and "Exact total 12.250000001" in text


def test_credit_notes_stand_on_the_statement_of_the_open_month(fleet):
    close(reason="fine")
    note = proposals.propose_credit_note(
        period=MONTH, tenant="a", class_="chat", amount_nanos=2_000_000_000, actor=FIN, now=NOW, reason="outage"
    )
    done = proposals.approve(note.pk, actor=BOSS, now=NOW, reason="agreed")
    assert done.event.period == "2026-12"
    client = factories.person("finance", name="ines")
    text = client.get("/finance/statements/a/?period=2026-12").content.decode()
    assert "Credit note of 2026-11" in text and "−2.00" in text and "outage" in text


def test_usage_of_the_last_minutes_is_on_its_way_and_no_worker_is_behind(fleet):
    roll_up(fleet, "b", "chat", model=RollupDelta)
    word = {
        minutes: next(
            check.word
            for check in checklist(MONTH, now=HOUR + timedelta(minutes=minutes)).checks
            if check.name == "behind"
        )
        for minutes in (1, 3)
    }
    assert word == {1: "0", 3: "1 waiting"}
