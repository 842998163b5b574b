"""An answer of the lab as figures, tables and a verdict, for pages. Nothing here adds what the answer does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from controlplane.core.capacity import PurchaseReason
from controlplane.core.money import NANOS_PER_UNIT
from controlplane.lab.interference import REASONS
from controlplane.web import figures
from controlplane.web.numerals import DASH, fixed, money

Answer = Mapping[str, Any]
RULE: Final = (
    "Do not buy if isolation restores the interactive objective and batch meets its deadline at today's size. Buy only"
    " if the isolated design misses either at the forecast load, or the floor leaves no headroom for one failed slot."
)
VERDICTS: Final = {
    "buy": ("risk", "Buy"),
    "do_not_buy": ("ok", "Do not buy"),
    "unknown": ("unknown", "Not decided"),
}
STAGES: Final = {
    "interactive_alone": "Interactive alone",
    "batch_alone": "Batch alone",
    "both": "Both, today",
    "both_at_forecast": "Both, forecast",
}
STAGE_FIGURES: Final = (
    ("admitted_per_s", "Admitted, requests/s", 2),
    ("ttft_ms.p50", "TTFT p50, ms", 0),
    ("ttft_ms.p95", "TTFT p95, ms", 0),
    ("ttft_ms.p99", "TTFT p99, ms", 0),
    ("attained", "Within the objective, share", 4),
    ("rejected_share", "Refused, share", 4),
    ("poor_share", "Poorly served, share", 4),
    ("longest_queue", "Longest queue, requests", 0),
    ("batch_done", "Batch items done", 0),
    ("batch_items", "Batch items", 0),
    ("batch_tokens_per_gpu_s", "Batch, tokens/GPU-s", 1),
    ("tokens_per_busy_slot_s", "All, tokens/busy slot-s", 1),
    ("lends", "Loans", 0),
    ("deadlines_met", "Deadlines met", 0),
)
CLASS_FIGURES: Final = (
    ("arrivals", "Arrivals", 0),
    ("completed", "Completed", 0),
    ("rejected", "Refused", 0),
    ("wait_ms.p50", "Wait p50, ms", 1),
    ("wait_ms.p95", "Wait p95, ms", 1),
    ("wait_ms.p99", "Wait p99, ms", 1),
    ("ttft_ms.p99", "TTFT p99, ms", 1),
    ("within_objective_of_arrivals", "Started within the objective, share", 4),
    ("gpu_s", "GPU time, s", 1),
)
POOL_FIGURES: Final = (
    ("flex.lends", "Loans", 0),
    ("flex.lent_slot_s", "Lent, slot-s", 0),
    ("flex.trips", "Trips", 0),
    ("flex.overdue", "Overdue drains", 0),
    ("preempted", "Preempted attempts", 0),
    ("all.utilisation", "Utilisation by requests, share", 4),
    ("all.longest_queue", "Longest queue, requests", 0),
    ("faults.slots_broken", "Slots that broke", 0),
    ("faults.requests_lost", "Requests lost with a slot", 0),
    ("faults.requests_retried", "Requests tried again", 0),
    ("faults.reports_lost", "Reports that never arrived", 0),
)
JOB_FIGURES: Final = (
    ("items", "Items", 0),
    ("done", "Items done", 0),
    ("finished_s", "Finished after, s", 0),
    ("deadline_met", "Deadline met", 0),
    ("gpu_s", "GPU time, s", 1),
)
VARIANT_FIGURES: Final = (
    ("arrivals", "Arrivals", 0),
    ("rejected", "Refused", 0),
    ("completed", "Completed", 0),
    ("wait_ms_p50", "Wait p50, ms", 1),
    ("wait_ms_p99", "Wait p99, ms", 1),
    ("ttft_ms_p99", "TTFT p99, ms", 1),
    ("attained", "Within the objective, share", 4),
    ("longest_queue", "Longest queue, requests", 0),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of an answer: of what, which, its value and its decimals."""

    of: str
    figure: str
    value: Any
    decimals: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown. Columns from `numeric_from` on are numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric_from: int = 1


@dataclass(frozen=True, slots=True)
class Section:
    """A panel of the page: a table, a chart with its words, or both."""

    id: str
    title: str
    table: Table | None = None
    chart: figures.Figure | None = None
    chart_text: str = ""
    foot: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to buy, with its reasons in words, the evidence and the rule."""

    chip: str
    word: str
    reasons: list[str]
    evidence: list[dict[str, str]]
    rule: str = RULE


@dataclass(frozen=True, slots=True)
class Shown:
    """Everything that a page shows of an answer."""

    facts: list[dict[str, str]]
    sections: list[Section]
    verdict: Verdict | None = None
    notes: list[str] = field(default_factory=list)


def say(value: Any, decimals: int = 0, *, signed: bool = False) -> str:
    """A figure as a cell: a dash for what is not known, words for yes and no."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    return fixed(value, 0 if isinstance(value, int) else decimals, signed=signed)


def lookup(document: Any, path: str) -> Any:
    """The value at a path; None where it ends early."""
    for part in path.split("."):
        if not isinstance(document, Mapping) or part not in document:
            return None
        document = document[part]
    return document


def _of(of: str, document: Answer, names: Iterable[tuple[str, str, int]]) -> list[Line]:
    return [Line(of, title, lookup(document, path), decimals) for path, title, decimals in names]


# ---- figures, for tables and for comparing ----


def _result_lines(result: Answer) -> list[Line]:
    found: list[Line] = []
    for slug, own in result["classes"].items():
        found += _of(f"class {slug}", own, CLASS_FIGURES)
        found += [
            Line(f"class {slug}", f"Refused: {reason.replace('_', ' ')}", count)
            for reason, count in (own.get("refused") or {}).items()
        ]
    found += [line for line in _of("pool", result, POOL_FIGURES) if line.value is not None]
    for job in result.get("jobs", ()):
        found += _of(f"job {job['job']}", job, JOB_FIGURES)
    return found


def lines_of(kind: str, answer: Answer) -> list[Line]:
    """Every figure of an answer by what it is of, in a fixed order."""
    return LINES[kind](answer)


def _interference_lines(answer: Answer) -> list[Line]:
    found = [
        Line("safe rate", f"With {slots} slots, requests/s", rate, 3) for slots, rate in answer["safe_rates"].items()
    ]
    for name, title in STAGES.items():
        if answer["stages"].get(name) is not None:
            found += _of(title, answer["stages"][name], STAGE_FIGURES)
    found.append(Line("forecast", "Rate, requests/s", answer["evidence"]["forecast_rate_per_s"], 3))
    return [*found, Line("verdict", "Verdict", VERDICTS[answer["verdict"]][1])]


def _variant_lines(answer: Answer) -> list[Line]:
    found = []
    for row in answer["rows"]:
        for slug, own in row["classes"].items():
            found += _of(f"{row['variant']}, {slug}", own, VARIANT_FIGURES)
        found += _of(
            row["variant"],
            row,
            (
                ("preempted", "Preempted attempts", 0),
                ("lends", "Loans", 0),
                ("idle_slot_s", "Idle, slot-s", 0),
                ("worst_tenant_wait_ms_p99", "Worst tenant, wait p99, ms", 1),
            ),
        )
        for job in row["jobs"]:
            found += _of(f"{row['variant']}, job {job['job']}", job, JOB_FIGURES[:4])
    return found


def _batching_lines(answer: Answer) -> list[Line]:
    names = (
        ("p50_ms", "p50, ms", 1),
        ("p95_ms", "p95, ms", 1),
        ("p99_ms", "p99, ms", 1),
        ("throughput_per_s", "Throughput, /s", 1),
        ("mean_batch", "Mean batch", 2),
    )
    found = []
    for cell in answer["cells"]:
        found += _of(f"batch {cell['max_batch_size']}, wait {cell['max_wait_ms']:g} ms", cell, names)
    return found


def _capacity_lines(answer: Answer) -> list[Line]:
    return [
        Line("fleet", "Slots needed", answer["needed_slots"]),
        Line("fleet", "Slots that can lose one", answer.get("with_one_failed")),
        Line("fleet", "Breaks first with one less", ", ".join(answer["breaks_first"]) or None),
        Line("scaling signal", "Slots by its arithmetic", lookup(answer, "signal.needed_slots")),
        Line("scaling signal", "Demand, slots", lookup(answer, "signal.demand_slots"), 2),
    ]


def _effect_lines(answer: Answer) -> list[Line]:
    draft = answer["draft"]
    return [*_result_lines(draft), Line("all", "Charges", money(draft["charge_nanos"]))]


def _offer_lines(answer: Answer) -> list[Line]:
    found = [Line("list", "Offers", answer["listed"]), Line("list", "Meet it", len(answer["feasible"]))]
    for row in answer["feasible"]:
        of = f"{offer_name(row)}, {row['price']}"
        found.append(Line(of, "A machine, an hour", row["machine_hour_nanos"] / NANOS_PER_UNIT, 2))
        found.append(Line(of, "In all", row["total_nanos"] / NANOS_PER_UNIT, 2))
    return found


def offer_name(row: Answer) -> str:
    """What an offer is called: its cloud, its machine, its GPUs."""
    return f"{row['cloud']} {row['name']}".strip() + f", {row['gpus']} × {row['gpu']}"


LINES: Final[Mapping[str, Callable[[Answer], list[Line]]]] = {
    "interference": _interference_lines,
    "replay": lambda answer: _result_lines(answer["result"]),
    "overload": _variant_lines,
    "designs": _variant_lines,
    "capacity": _capacity_lines,
    "batching": _batching_lines,
    "effect": _effect_lines,
    "offers": _offer_lines,
}


def compared(kind: str, ours: Answer, theirs: Answer) -> Table:
    """Two answers of one kind, figure by figure; what only one of them has is a dash in the other, what neither has is
    left out."""
    tables = [
        {(line.of, line.figure): line for line in lines_of(kind, answer) if line.value is not None}
        for answer in (ours, theirs)
    ]
    keys = list(dict.fromkeys([*tables[0], *tables[1]]))
    rows = [pair_row(key, tables[0].get(key), tables[1].get(key)) for key in keys]
    return Table(("Of", "Figure", "First", "Second", "Change"), rows, numeric_from=2)


def pair_row(key: tuple[str, str], one: Line | None, other: Line | None) -> list[str]:
    """of, figure, first, second, change."""
    decimals = max(line.decimals for line in (one, other) if line is not None)
    values = [None if line is None else line.value for line in (one, other)]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    change = numbers[1] - numbers[0] if len(numbers) == 2 else None
    return [*key, *(say(value, decimals) for value in values), say(change, decimals, signed=True)]


def verdict_of(answer: Answer) -> Verdict:
    """The verdict of an interference test."""
    chip, word = VERDICTS[answer["verdict"]]
    evidence, objective = answer["evidence"], answer["objective"]
    reasons = [f"{text[:1].upper()}{text[1:]}." for text in (REASONS[PurchaseReason(one)] for one in answer["reasons"])]
    facts = [
        ("Objective", f"{objective['target'] * 100:g} % within {objective['ttft_ms']:,g} ms"),
        ("Interactive keeps it at the forecast", say(evidence["interactive_met"])),
        ("Batch meets its deadlines at the forecast", say(evidence["batch_met"])),
        ("Forecast, requests/s", say(evidence["forecast_rate_per_s"], 2)),
        ("Floor less one slot carries, requests/s", say(evidence["safe_rate_one_failed_per_s"], 2)),
    ]
    return Verdict(chip, word, reasons, [{"label": label, "value": value} for label, value in facts])
