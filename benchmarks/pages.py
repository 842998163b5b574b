"""Every list at 10,000 tenants and 100,000 keys: server time of pages and REST lists beside LIMIT and OFFSET.

    python -m benchmarks.pages [--quick] [--rounds N] [--json FILE]

First pages, deep pages by cursor, searches, filters, orders and the first bytes of exports, each through the whole
stack of the web process (middleware, session, templates) but for the socket, beside the same list as Django has it out
of the box, in turns; and the CPU time of ours, which others on the machine do not lengthen. Every address that opens
without arguments is in it, so that no list is left out. Uses a database of its own on the server of `DATABASE_URL`, or
on a throwaway server. Exit 1 when a page takes longer than the goal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.ingest import benchmark_database, benchmark_servers

GOAL_MS = 200.0
TENANTS, KEYS = 10_000, 100_000
QUICK_PART = 10
CALLS_LEAST, CASE_MS_MOST = 3, 12_000.0
DEEP = 0.9
"""How far into a list its deep page lies."""
LEFT_OUT = frozenset({"logout", "api-schema", "live-frames", "metrics"})
"""Addresses that are no page: signing out, the description of REST (built once and kept), an export of frames."""

NO_LISTS = {
    "/policy/review/": "compiles and checks the whole draft",
    "/policy/unpushed/": "compiles and checks the whole draft",
    "/lab/draft-effect/": "compiles the whole draft",
    "/api/v1/reports/charges/": "a report with a row for every tenant",
    "/api/v1/reports/attribution/": "a report with a row for every tenant",
    "/api/v1/slo/status/": "every contract at once",
    "/finance/": "adds up a month of every tenant",
}
"""Addresses that answer for everything at once, by what they do: they are timed as the lists are, and said apart."""


@dataclass
class Case:
    """One address, and the peer's beside it where there is one. `export`: the time to its first bytes counts."""

    name: str
    url: str
    peer: str = ""
    person: str = "admin"
    export: bool = False
    queries: int = 0
    cpu_ms: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows, for a look")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose name or address holds one of these texts, with commas")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    part = QUICK_PART if options.quick else 1
    with benchmark_servers(), benchmark_database() as url:
        os.environ |= {
            "DATABASE_URL": url,
            "FLEXBAND_AS_OWNER": "true",
            "FLEXBAND_INSECURE_LOOPBACK": "true",
            "FLEXBAND_LOG_LEVEL": "ERROR",
            "DJANGO_SETTINGS_MODULE": "controlplane.config.settings",
        }
        import django
        from django.conf import settings

        django.setup()
        settings.ROOT_URLCONF = "benchmarks.pages_peer"
        rounds = options.rounds or (10 if options.quick else 40)
        table = measure(TENANTS // part, KEYS // part, rounds, options.only)
    print_table(table)
    if options.json:
        options.json.write_text(json.dumps(table, indent=2))
    return 1 if table["missed"] else 0


def measure(tenants: int, keys: int, rounds: int, only: str) -> dict[str, Any]:
    from django.core.management import call_command
    from django.test import Client

    from benchmarks.pages_world import build
    from controlplane.exchange.collector import spare_reports

    call_command("migrate", verbosity=0)
    began = time.perf_counter()
    now = datetime.now(UTC)
    world = build(tenants, keys, now)
    filled = time.perf_counter() - began
    spare_reports()  # as the web process does when it has loaded
    people = {"admin": Client(SERVER_NAME="localhost"), "tenant": Client(SERVER_NAME="localhost")}
    people["admin"].force_login(world.admin)
    people["tenant"].force_login(world.tenant_person)
    lists = cases(tenants, keys, now)
    wanted = only.split(",")
    chosen = [
        case
        for case in [*lists, *others(people["admin"], lists)]
        if any(text in case.name or text in case.url for text in wanted)
    ]
    for case in chosen:
        prepare(case, people)
    spent: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for number, case in enumerate(chosen):
            for side, url in (("ours", case.url), ("peer", case.peer)):
                taken = spent.setdefault((number, side), [])
                # What is far over the goal is known to be after a few calls.
                if url and (len(taken) < CALLS_LEAST or sum(taken) < CASE_MS_MOST):
                    before = cpu_ms()
                    taken.append(ms_of(people[case.person], url, export=case.export))
                    if side == "ours" and (after := cpu_ms())[0] == before[0]:
                        case.cpu_ms.append(after[1] - before[1])
    rows = [row_of(case, spent[number, "ours"], spent[number, "peer"]) for number, case in enumerate(chosen)]
    return {
        "world": world.counts,
        "fill_s": filled,
        "rounds": rounds,
        "goal_ms": GOAL_MS,
        "rows": rows,
        "missed": [row["name"] for row in rows if row["p99_ms"] > GOAL_MS],
        "exports": exports(people["admin"]) if not only else [],
    }


def cases(tenants: int, keys: int, now: datetime) -> list[Case]:
    """The lists with everything that a person does to them."""
    from django.db.models import Q

    from benchmarks.pages_world import class_slug, tenant_slug
    from controlplane.audit.models import AuditEntry
    from controlplane.budgets.models import Budget
    from controlplane.budgets.tenant_queries import FINE, SORTS, by_attention
    from controlplane.tenants.models import ApiKey, Member, Tenant
    from controlplane.web.pagination import keyset_page

    def after(rows: Any, order: tuple[str, ...]) -> str:
        """The cursor behind the first of the rows."""
        return str(keyset_page(rows, order, cursor=None, limit=1).next_cursor)

    far = tenant_slug(int(tenants * DEEP))
    page = int(tenants * DEEP) // 50
    all_tenants = by_attention(Tenant.objects.exclude(state=Tenant.State.ARCHIVED), now)
    members = Member.objects.count()
    name = f"person-{int(members * DEEP)}"
    entries = AuditEntry.objects.count()
    deep_tenants = after(all_tenants.filter(Q(attention=FINE), slug__gte=far), SORTS["attention"])
    deep_member = after(Member.objects.filter(user__username__gte=name), ("user__username", "id"))
    deep_key = ApiKey.objects.filter(id__lte=int(keys * (1 - DEEP)))
    deep_entry = AuditEntry.objects.filter(id__lte=int(entries * (1 - DEEP)))
    found = [
        Case("tenants, attention first", "/tenants/", "/peer/tenants/"),
        Case("tenants, attention first, deep", f"/tenants/?cursor={deep_tenants}", f"/peer/tenants/?page={page}"),
        Case("tenants by name", "/tenants/?sort=name", "/peer/tenants/"),
        Case(
            "tenants by name, deep",
            f"/tenants/?sort=name&cursor={after(all_tenants.filter(slug__gte=far), SORTS['name'])}",
            f"/peer/tenants/?page={page}",
        ),
        Case("tenants, newest first", "/tenants/?sort=newest", "/peer/tenants/"),
        Case("tenants, search: one", f"/tenants/?q={far}", f"/peer/tenants/?q={far}"),
        Case("tenants, search: many", "/tenants/?q=north", "/peer/tenants/?q=north"),
        Case("tenants, search: a key's name", "/tenants/?q=service+77", ""),
        Case("tenants, search: none", "/tenants/?q=zzzzz", "/peer/tenants/?q=zzzzz"),
        Case("tenants of a class", f"/tenants/?class={class_slug(3)}"),
        Case("tenants, suspended", "/tenants/?state=suspended"),
        Case("tenants, CSV: first bytes", "/tenants/?format=csv&state=all", export=True),
        Case("tenants as a tenant's member", "/tenants/", person="tenant"),
        Case("keys", "/keys/", "/peer/keys/"),
        Case("keys, deep", f"/keys/?cursor={after(deep_key, ('-id',))}", f"/peer/keys/?page={int(keys * DEEP) // 50}"),
        Case("keys, search: one", f"/keys/?q=service+{keys - 1}", f"/peer/keys/?q=service+{keys - 1}"),
        Case("keys, search: many", "/keys/?q=service", "/peer/keys/?q=service"),
        Case("keys, search: an id", "/keys/?q=key_000000000777", "/peer/keys/?q=key_000000000777"),
        Case("keys, search: none", "/keys/?q=zzzzz", "/peer/keys/?q=zzzzz"),
        Case("keys, revoked", "/keys/?state=revoked"),
        Case("keys, expired", "/keys/?state=expired"),
        Case("keys, CSV: first bytes", "/keys/?format=csv&state=all", export=True),
        Case("keys as a tenant's member", "/keys/", person="tenant"),
        Case("members", "/settings/members/", "/peer/members/"),
        Case(
            "members, deep",
            f"/settings/members/?cursor={deep_member}",

            f"/peer/members/?page={int(members * DEEP) // 50}",
        ),
        Case("members, search", f"/settings/members/?q={name}", f"/peer/members/?q={name}"),
        Case("members of a role", "/settings/members/?role=finance"),
        Case("invitations", "/settings/invitations/"),
        Case("audit", "/audit/", "/peer/audit/"),
        Case("audit, deep", f"/audit/?cursor={after(deep_entry, ('-id',))}",
             f"/peer/audit/?page={int(entries * DEEP) // 50}"),
        Case("audit of a tenant", f"/audit/?tenant={far}"),
        Case("audit of a person", "/audit/?actor=person-50", "/peer/audit/?q=person-50"),
        Case("audit of nobody", "/audit/?actor=zzzzz", "/peer/audit/?q=zzzzz"),
        Case("audit of a day", f"/audit/?since={now:%Y-%m-%d}"),
        Case("audit, CSV: first bytes", "/audit/?format=csv", export=True),
        Case("budgets", "/budgets/", "/peer/budgets/"),
        Case(
            "budgets, deep",
            "/budgets/?sort=tenant"
            f"&cursor={after(Budget.objects.filter(tenant__slug__gte=far), ('tenant__slug', 'id'))}",
            f"/peer/budgets/?page={page}",
        ),
        Case("budgets, over forecast", "/budgets/?state=forecast"),
        Case("budgets, search", f"/budgets/?q={far}", f"/peer/budgets/?q={far}"),
        Case("budgets, CSV: first bytes", "/budgets/?format=csv", export=True),
        Case("finance, a month of all tenants", f"/finance/?{four_weeks(now)}"),
        Case("finance, a tenant of it unfolded", f"/finance/?{four_weeks(now)}&tenant={far}"),
        Case("statements", "/finance/statements/"),
        Case("statements, search", f"/finance/statements/?q={far}"),
        Case("rates, search", "/rates/?q=model-7"),
        Case("pools by name", "/pools/?sort=name"),
        Case("contracts", "/contracts/", "/peer/contracts/"),
        Case("configuration, file: first bytes", "/policy/configuration/export/", export=True),
        Case("configuration, REST: first bytes", "/api/v1/policy/configuration/", export=True),
        Case("contracts as a tenant's member", "/contracts/", person="tenant"),
        *(
            Case(f"a tenant, {tab}", f"/tenants/{far}/?tab={tab}")
            for tab in ("overview", "keys", "budgets", "contracts", "members", "audit")
        ),
        Case("form: edit a tenant", f"/tenants/{far}/edit/"),
        Case("REST tenants", "/api/v1/tenants/", "/peer/api/tenants/"),
        Case(
            "REST tenants, deep",
            f"/api/v1/tenants/?cursor={after(Tenant.objects.filter(slug__gte=far), ('slug', 'id'))}",
            f"/peer/api/tenants/?page={page}",
        ),
        Case("REST tenants, search", "/api/v1/tenants/?q=north"),
        Case("REST tenants by weight", "/api/v1/tenants/?ordering=-weight"),
        Case(
            "REST tenants by weight, deep",
            f"/api/v1/tenants/?ordering=-weight&cursor={after(Tenant.objects.filter(weight=1), ('-weight', '-id'))}",
        ),
        Case("REST keys", "/api/v1/api-keys/", "/peer/api/api-keys/"),
        Case(
            "REST keys, deep",
            f"/api/v1/api-keys/?cursor={after(deep_key, ('-id',))}",
            f"/peer/api/api-keys/?page={int(keys * DEEP) // 50}",
        ),
        Case("REST keys of a tenant", f"/api/v1/api-keys/?tenant={far}"),
        Case("REST keys, search", "/api/v1/api-keys/?q=service+77"),
        Case("REST keys by last use", "/api/v1/api-keys/?ordering=-last_used_at"),
        Case(
            "REST keys by last use, deep",
            "/api/v1/api-keys/?ordering=-last_used_at"
            f"&cursor={after(ApiKey.objects.filter(id__gte=int(keys * DEEP)), ('-last_used_at', '-id'))}",
        ),
        Case("REST members", "/api/v1/members/", "/peer/api/members/"),
        Case("REST audit", "/api/v1/audit/", "/peer/api/audit/"),
        Case(
            "REST audit, deep",
            f"/api/v1/audit/?cursor={after(deep_entry, ('-id',))}",
            f"/peer/api/audit/?page={int(entries * DEEP) // 50}",
        ),
    ]  # fmt: skip
    return found


def four_weeks(now: datetime) -> str:
    """The days that have charges and costs."""
    return f"from={now.date() - timedelta(days=28)}&to={now.date() - timedelta(days=1)}"


def others(client: Any, known: list[Case]) -> list[Case]:
    """Every other address without arguments that answers a page or a list."""
    seen = {case.url.partition("?")[0] for case in known}
    found = []
    for name, url in addresses():
        if url in seen or name in LEFT_OUT or url.startswith("/peer/"):
            continue
        response = client.get(url)
        kind = response.headers.get("Content-Type", "")
        if response.status_code == 200 and not response.streaming and ("html" in kind or "json" in kind):
            found.append(Case(url, url))
            seen.add(url)
    return sorted(found, key=lambda case: (case.url.startswith("/api/"), case.url))


def addresses() -> list[tuple[str, str]]:
    from django.urls import NoReverseMatch, URLPattern, get_resolver, reverse

    def walk(patterns: Any, held: bool) -> Any:
        for entry in patterns:
            arguments = held or bool(entry.pattern.regex.groupindex)
            if not isinstance(entry, URLPattern):
                yield from walk(entry.url_patterns, arguments)
            elif entry.name and not arguments:
                yield entry.name

    found = []
    for name in dict.fromkeys(walk(get_resolver().url_patterns, False)):
        with contextlib.suppress(NoReverseMatch):
            found.append((name, reverse(name)))
    return found


def prepare(case: Case, people: dict[str, Any]) -> None:
    """Opens both once, so that nothing is compiled or cached while the clock runs, and counts our statements."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    for url in filter(None, (case.url, case.peer)):
        response = people[case.person].get(url)
        if response.status_code != 200:
            raise SystemExit(f"{case.name}: {url} answered {response.status_code}")
        consume(response, first_only=case.export)
    with CaptureQueriesContext(connection) as statements:
        consume(people[case.person].get(case.url), first_only=case.export)
    case.queries = len(statements)


def ms_of(client: Any, url: str, *, export: bool) -> float:
    began = time.perf_counter()
    consume(client.get(url), first_only=export)
    return (time.perf_counter() - began) * 1000


def cpu_ms() -> tuple[int, float]:
    """CPU time of this thread and of the database's process that works for it (whose id comes first), which others on
    the machine do not lengthen. What is not on this machine, or in parallel workers, is not in it.
    """
    from django.db import connection

    connection.ensure_connection()
    pid = connection.connection.info.backend_pid
    try:
        backend = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6
    except OSError:
        backend = 0.0
    return pid, time.thread_time() * 1000 + backend


def consume(response: Any, *, first_only: bool) -> int:
    """Bytes of an answer; of an export only the first piece unless all of it is wanted."""
    if not response.streaming:
        return len(response.content)
    pieces = iter(response.streaming_content)
    size = len(next(pieces))
    if not first_only:
        size += sum(len(piece) for piece in pieces)
    response.close()
    return size


def row_of(case: Case, ours: list[float], peer: list[float] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": case.name, "url": case.url, "queries": case.queries, "p50_ms": statistics.median(ours),
        "p99_ms": percentile(ours, 0.99), "cpu_ms": statistics.median(case.cpu_ms) if case.cpu_ms else None,
        "peer_ms": None, "ratio": None, "kind": NO_LISTS.get(case.url.partition("?")[0], ""),
    }  # fmt: skip
    if peer:
        row["peer_ms"] = statistics.median(peer)
        row["ratio"] = row["peer_ms"] / row["p50_ms"]
    return row


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def exports(client: Any) -> list[dict[str, Any]]:
    """Whole exports, once: they stream, so what counts is that they go on and hold no memory."""
    found = []
    for name, url in (
        ("tenants", "/tenants/?format=csv&state=all"),
        ("keys", "/keys/?format=csv&state=all"),
        ("budgets", "/budgets/?format=csv"),
        ("audit", "/audit/?format=csv"),
        ("the configuration", "/policy/configuration/export/"),
    ):
        began = time.perf_counter()
        lines = sum(piece.count(b"\n") for piece in client.get(url).streaming_content)
        found.append({"name": name, "rows": lines - 1, "seconds": time.perf_counter() - began})
    return found


def print_table(table: dict[str, Any]) -> None:
    say = sys.stdout.write
    say(", ".join(f"{count:,} {name}" for name, count in table["world"].items()))
    say(f"; filled in {table['fill_s']:.0f} s, {table['rounds']} calls of each\n\n")
    say(
        f"{'page':34} {'queries':>7} {'p50 ms':>8} {'p99 ms':>8} {'goal':>6} {'cpu ms':>8} {'peer p50':>9}"
        f" {'peer/ours':>9}\n"
    )
    for row in table["rows"]:
        peer = f"{row['peer_ms']:>9.1f} {row['ratio']:>9.2f}" if row["peer_ms"] else f"{'-':>9} {'-':>9}"
        cpu = f"{row['cpu_ms']:>8.1f}" if row["cpu_ms"] is not None else f"{'-':>8}"
        missed = "  missed" if row["p99_ms"] > table["goal_ms"] else ""
        missed += f" ({row['kind']})" if missed and row["kind"] else ""
        say(
            f"{row['name'][:34]:34} {row['queries']:>7} {row['p50_ms']:>8.1f} {row['p99_ms']:>8.1f}"
            f" {table['goal_ms']:>6.0f} {cpu} {peer}{missed}\n"
        )
    for row in table["exports"]:
        say(f"whole export of {row['name']}: {row['rows']:,} rows in {row['seconds']:.1f} s\n")
    say(f"\n{len(table['rows'])} addresses, {len(table['missed'])} over the goal\n")


if __name__ == "__main__":
    sys.exit(main())
