"""What a headless run adds up to: the clients' counts beside the control plane's, and whether every sum holds."""

import time
import urllib.request
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import connection
from django.utils import timezone

from controlplane.core.reasons import Outcome
from controlplane.demo.job_sums import JobSums, items_open, job_sums
from controlplane.demo.plan import TrafficResult
from controlplane.demo.viewer import ViewerResult
from controlplane.fleet.models import Agent, AgentLive
from controlplane.flex.models import Lend
from controlplane.live.contracts import evaluate
from controlplane.live.in_force import in_force
from controlplane.policy.models import Delivery, Revision
from controlplane.usage.models import AgentCursor

SETTLE_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.5
METRICS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Marks:
    """Where the installation stood before the run, so that a second run on the same data counts itself alone."""

    since: datetime
    reported: int
    repeats: int
    refused: int

    @classmethod
    def now(cls) -> "Marks":
        counted = _one("SELECT coalesce(sum(records), 0), coalesce(sum(repeats), 0) FROM usage_agentcursor")
        return cls(timezone.now(), reported=int(counted[0]), repeats=int(counted[1]), refused=_refusals())


@dataclass(frozen=True, slots=True)
class Check:
    """One sum that has to hold: `left` and `right` in the unit of the name."""

    name: str
    left: int
    right: int

    @property
    def held(self) -> bool:
        return self.left == self.right


def wait_until_settled(since: datetime, admin: dict[str, str]) -> bool:
    """Waits until every agent has reported after the traffic's end with nothing queued, running or unreported."""
    ended = timezone.now()
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while time.monotonic() < deadline:
        live = list(AgentLive.objects.filter(agent__state=Agent.State.ACTIVE, reported_at__gt=ended))
        expected = Agent.objects.filter(state=Agent.State.ACTIVE, live__reported_at__gte=since).count()
        idle = len(live) >= expected and not any(_busy(row.figures) for row in live)
        if idle and not items_open() and _spools_empty(admin):
            return True
        time.sleep(LOOK_EVERY_S)
    return False


def _busy(figures: dict[str, Any]) -> bool:
    return any(row["depth"] or row["running"] for row in figures.get("classes", []))


def _spools_empty(admin: dict[str, str]) -> bool:
    return all(value == 0 for value in gather(admin, "flexband_usage_records_unreported").values())


def gather(admin: dict[str, str], name: str) -> dict[str, float]:
    """A metric of every agent, summed over its labels; an agent that does not answer is missing, never zero."""
    found = {}
    for agent, address in admin.items():
        try:
            with urllib.request.urlopen(f"{address}/metrics", timeout=METRICS_TIMEOUT_S) as page:
                lines = page.read().decode().splitlines()
        except OSError:
            continue
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        if values:
            found[agent] = sum(values)
    return found


def summarise(
    *,
    marks: Marks,
    traffic: TrafficResult,
    viewer: ViewerResult,
    admin: dict[str, str],
    cost: dict[str, Any],
) -> dict[str, Any]:
    """The summary of interfaces: every part from where it is kept, `checks` beside them."""
    ends = _ends(marks)
    usage = _usage(marks, admin)
    charges = _charges(marks.since)
    jobs = job_sums(marks.since, timezone.now())
    summary = {
        "requests": {
            "offered": traffic.offered - traffic.unreachable,
            "admitted": traffic.admitted,
            "queued": ends["queued"],
            "downgraded": ends["downgraded"],
            "rejected_by_reason": traffic.rejected_by_reason,
            "completed": traffic.completed,
            "cancelled": traffic.cancelled,
            "failed": traffic.failed,
            "unreachable": traffic.unreachable,
        },
        "tokens": {"prompt": traffic.prompt_tokens, "output": traffic.output_tokens},
        "usage": usage,
        "cost_nanos": cost,
        "charges_nanos": charges,
        "policy": _policy(),
        "flex": _flex(marks.since),
        "jobs": [asdict(job) for job in jobs.jobs],
        "slo": _slo(),
        "live": {"frames": viewer.frames, "lag_ms_p50": viewer.lag_ms_p50, "lag_ms_p99": viewer.lag_ms_p99},
    }
    checks = _checks(traffic, ends, usage, cost, charges, jobs)
    summary["checks"] = [
        {"name": check.name, "left": check.left, "right": check.right, "held": check.held} for check in checks
    ]
    return summary


def _checks(
    traffic: TrafficResult,
    ends: dict[str, int],
    usage: dict[str, Any],
    cost: dict[str, Any],
    charges: dict[str, Any],
    jobs: JobSums,
) -> list[Check]:
    offered = traffic.offered - traffic.unreachable
    return [
        Check("offered = admitted + rejected", offered, traffic.admitted + traffic.rejected),
        Check(
            "admitted = completed + cancelled + failed",
            traffic.admitted,
            traffic.completed + traffic.cancelled + traffic.failed,
        ),
        Check("admitted by clients = admitted by records", traffic.admitted, ends["admitted"]),
        Check("completed by clients = completed by records", traffic.completed, ends["completed"]),
        Check("rejected by clients = refusals counted", traffic.rejected, ends["refused"]),
        Check("records sent = records stored", usage["records_sent"], usage["records_stored"]),
        Check("prompt tokens of requests = of records", traffic.prompt_tokens, ends["prompt_tokens"]),
        Check("output tokens of requests = of records", traffic.output_tokens, ends["output_tokens"]),
        Check("attributed cost = fleet cost, nanos", cost["attributed"], cost["fleet"]),
        Check("cost by tenant adds up, nanos", sum(cost["by_tenant"].values()), cost["fleet"]),
        Check("charges by tenant add up, nanos", sum(charges["by_tenant"].values()), charges["total"]),
        Check("items = completed + parked + cancelled", jobs.items, jobs.ended),
        Check("items completed = results stored", jobs.completed, jobs.results),
        Check("results stored = their records that are charged", jobs.results, jobs.charged_results),
        Check("charges of jobs = of their records, nanos", jobs.charge_nanos, jobs.record_nanos),
    ]


def _ends(marks: Marks) -> dict[str, int]:
    """By the last attempt of each request of a client whose record came in since then; items of jobs have none."""
    names = ["admitted", "completed", "cancelled", "prompt_tokens", "output_tokens", "queued", "downgraded"]
    row = _one(
        """
        WITH last AS (
            SELECT DISTINCT ON (request_id) * FROM usage_record
            WHERE received_at >= %s AND job_id NOT IN (SELECT id FROM jobs_job WHERE has_items)
            ORDER BY request_id, attempt DESC
        )
        SELECT count(*), count(*) FILTER (WHERE outcome = %s), count(*) FILTER (WHERE outcome = %s),
               coalesce(sum(prompt_tokens) FILTER (WHERE outcome = %s), 0),
               coalesce(sum(output_tokens) FILTER (WHERE outcome = %s), 0),
               count(*) FILTER (WHERE queue_us > 0), count(*) FILTER (WHERE class_id <> asked_class_id)
        FROM last
        """,
        [marks.since, *(outcome.code for outcome in (
            Outcome.COMPLETED, Outcome.CANCELLED_BY_CLIENT, Outcome.COMPLETED, Outcome.COMPLETED))],
    )  # fmt: skip
    return {**{name: int(value) for name, value in zip(names, row)}, "refused": _refusals() - marks.refused}


def _refusals() -> int:
    return int(_one("SELECT coalesce(sum(count), 0) FROM usage_refusalminute")[0])


def _usage(marks: Marks, admin: dict[str, str]) -> dict[str, Any]:
    stored = _one("SELECT count(*) FROM usage_record WHERE received_at >= %s", [marks.since])
    cursors = AgentCursor.objects.all().values_list("records", "repeats")
    sent = gather(admin, "flexband_usage_records_total")
    return {
        "records_sent": int(sum(sent.values())) if len(sent) == len(admin) else None,
        "records_stored": int(stored[0]),
        "records_counted_by_cursors": sum(records for records, _ in cursors) - marks.reported,
        "batches_duplicate": sum(repeats for _, repeats in cursors) - marks.repeats,
    }


def _charges(since: datetime) -> dict[str, Any]:
    rows = _all(
        """
        SELECT t.slug, sum(charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos)
        FROM usage_record r JOIN tenants_tenant t ON t.id = r.tenant_id WHERE received_at >= %s GROUP BY 1 ORDER BY 1
        """,
        [since],
    )
    total = _one(
        """
        SELECT coalesce(sum(charge_prompt_nanos + charge_cached_nanos + charge_output_nanos + charge_gpu_nanos), 0)
        FROM usage_record WHERE received_at >= %s
        """,
        [since],
    )
    return {"total": int(total[0]), "by_tenant": {slug: int(nanos) for slug, nanos in rows}}


def _policy() -> dict[str, Any]:
    revision = Revision.objects.order_by("-number").first()
    deliveries = Delivery.objects.filter(rollout__revision=revision) if revision else Delivery.objects.none()
    times_ms = sorted(
        (row.answered_at - row.sent_at).total_seconds() * 1_000
        for row in deliveries
        if row.state == Delivery.State.ACKED and row.sent_at and row.answered_at
    )
    return {
        "revision": revision.number if revision else None,
        "agents": len(deliveries),
        "acked": sum(row.state == Delivery.State.ACKED for row in deliveries),
        "ack_ms_p50": _nearest_rank(times_ms, 0.50),
        "ack_ms_p99": _nearest_rank(times_ms, 0.99),
    }


def _nearest_rank(ordered: list[float], share: float) -> float | None:
    if not ordered:
        return None
    return round(ordered[max(0, -(-int(share * 100) * len(ordered) // 100) - 1)], 1)


def _flex(since: datetime) -> dict[str, Any]:
    lends = list(Lend.objects.filter(lent_at__gte=since))
    drains = [row.drain_us for row in lends if row.drain_us is not None]
    return {
        "lends": len(lends),
        "recalls": sum(row.recalled_at is not None for row in lends),
        "recalled_by": sorted({row.recall_reason for row in lends if row.recall_reason}),
        "drain_ms_max": round(max(drains) / 1_000, 1) if drains else None,
        "overdue": sum(row.overdue for row in lends),
    }


def _slo() -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    standings = in_force(now)
    found = []
    for evaluation in evaluate(standings, now).values():
        verdict = str(evaluation.result.verdict)
        for population, row in evaluation.result.populations.items():
            found.append(
                {
                    "contract": evaluation.contract.slug,
                    "population": str(population),
                    "compliance": None if row.compliance is None else float(row.compliance),
                    "met": {"met": True, "missed": False}.get(verdict),
                }
            )
    return found


def _one(sql: str, values: list[Any] | None = None) -> tuple[Any, ...]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values or [])
        row: tuple[Any, ...] = cursor.fetchone()
    return row


def _all(sql: str, values: list[Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
    return rows
