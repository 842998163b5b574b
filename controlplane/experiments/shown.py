"""What the page of an answer shows, by kind: tables with a chart where a picture says more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from controlplane.core.money import NANOS_PER_UNIT, format_nanos
from controlplane.experiments.answers import (
    CLASS_FIGURES,
    JOB_FIGURES,
    POOL_FIGURES,
    STAGE_FIGURES,
    STAGES,
    VARIANT_FIGURES,
    Answer,
    Line,
    Section,
    Shown,
    Table,
    lookup,
    offer_name,
    pair_row,
    say,
    verdict_of,
)
from controlplane.lab.offers import wanted_text
from controlplane.web import figures
from controlplane.web.numerals import money

TENANT_ROWS: Final = 200
OFFERS_CHARTED: Final = 12


def shown(kind: str, answer: Answer) -> Shown:
    """Facts, panels and, for an interference test, the verdict."""
    return SHOWN[kind](answer)


def _facts(*pairs: tuple[str, Any]) -> list[dict[str, str]]:
    return [{"label": label, "value": value if isinstance(value, str) else say(value, 2)} for label, value in pairs]


def _across(names: Sequence[tuple[str, str, int]], columns: Mapping[str, Answer], head: str) -> Table:
    """Figures as rows, one column each; rows that nobody knows are left out."""
    rows = []
    for path, title, decimals in names:
        values = [lookup(document, path) for document in columns.values()]
        if any(value is not None for value in values):
            rows.append([title, *(say(value, decimals) for value in values)])
    return Table((head, *columns), rows)


def _interference(answer: Answer) -> Shown:
    stages = {title: answer["stages"][name] for name, title in STAGES.items() if answer["stages"].get(name)}
    rates = answer["safe_rates"]
    objective = answer["objective"]
    best = ", ".join(f"{_slots(slots)} {say(rate, 2)}/s" for slots, rate in rates.items())
    p95 = {title: lookup(stage, "ttft_ms.p95") for title, stage in stages.items() if stage.get("ttft_ms")}
    sections = [
        Section("stages", "The three stages", _across(STAGE_FIGURES, stages, "Figure")),
        Section(
            "rates", "Highest admitted rate that keeps the objective",
            Table(("Slots that serve interactive", "Rate, requests/s"), [[n, say(r, 3)] for n, r in rates.items()]),
            figures.bars([_slots(slots) for slots in rates], list(rates.values()), unit="requests/s", decimals=2),
            f"Interactive alone: {best}.",
            "Found by bisection on how fast the trace is replayed. The lowest is the floor with one slot failed.",
        ),
    ]  # fmt: skip
    if p95:
        told = ", ".join(f"{title} {say(value)} ms" for title, value in p95.items())
        sections.append(
            Section(
                "ttft", "Time to first token, p95, by stage",
                chart=figures.bars(list(p95), list(p95.values()), unit="ms"),
                chart_text=f"{told}; the objective is {objective['ttft_ms']:,g} ms for"
                f" {objective['target'] * 100:g} %.",
            )
        )  # fmt: skip
    facts = _facts(
        ("Slots", f"{len(answer['bands'])}: " + ", ".join(_bands(answer["bands"]))), ("Service", answer["service"])
    )
    return Shown(facts, sections, verdict_of(answer), [answer["note"]])


def _slots(count: str) -> str:
    return f"{count} slot" if count == "1" else f"{count} slots"


def _bands(bands: Sequence[str]) -> list[str]:
    return [f"{bands.count(name)} {name}" for name in dict.fromkeys(bands)]


def _replay(answer: Answer) -> Shown:
    facts = _facts(
        ("Policy", answer["policy"]), ("Slots", f"{answer['slots']} of {answer['per_slot']} places"),
        ("Service", answer["result"]["service"]),
    )  # fmt: skip
    refused = [
        f"{name}: {len(lines)} lines were left out, the first is line {lines[0]['line']}: {lines[0]['reason']}"
        for name, lines in answer["refused_lines"].items()
        if lines
    ]
    if "against" in answer:
        second = answer["against"]
        facts += _facts(("Beside it", second["policy"] + "".join(f", {k}={v}" for k, v in second["set"].items())))
        sections = _beside({"First": answer["result"], "Second": second["result"]})
    else:
        groups = {"All": answer["result"]["all"], **answer["result"]["classes"]}
        sections = [
            Section("classes", "By class", _across(CLASS_FIGURES, groups, "Figure"), *_waits_chart(groups)),
            *_pool_sections({"Value": answer["result"]}),
        ]
    return Shown(facts, sections, notes=[answer["note"], *refused])


def _waits_chart(groups: Mapping[str, Answer]) -> tuple[figures.Figure, str]:
    percents = ("p50", "p90", "p95", "p99")
    series = [figures.Series(name, [lookup(own, f"wait_ms.{one}") for one in percents]) for name, own in groups.items()]
    told = "; ".join(f"{name} p99 {say(lookup(own, 'wait_ms.p99'), 1)} ms" for name, own in groups.items())
    return figures.line_series(list(percents), series, unit="ms"), f"Waits by percentile: {told}."


def _beside(results: Mapping[str, Answer]) -> list[Section]:
    """Two results, figure by figure, with their difference."""
    one, other = results.values()
    columns = ("Of", "Figure", *results, "Change")
    rows, waits = [], {}
    for slug, own in one["classes"].items():
        theirs = other["classes"].get(slug, {})
        rows += [_pair(slug, own, theirs, row) for row in CLASS_FIGURES]
        for name, result in zip(results, (own, theirs), strict=True):
            waits[f"{slug}, {name.lower()}"] = result
    found = [Section("classes", "Waits by class", Table(columns, rows, 2), *_waits_chart(waits))]
    refused = _refusals(one, other)
    if refused:
        found.append(Section("refusals", "Refusals by reason", Table(columns, refused, 2)))
    pool = [_pair("pool", one, other, row) for row in POOL_FIGURES if lookup(one, row[0]) is not None]
    found.append(Section("pool", "Loans and the pool", Table(columns, pool, 2)))
    theirs_by_name = {job["job"]: job for job in other.get("jobs", ())}
    jobs = [
        _pair(job["job"], job, theirs_by_name.get(job["job"], {}), row)
        for job in one.get("jobs", ())
        for row in JOB_FIGURES
    ]
    if jobs:
        found.append(Section("jobs", "Jobs and deadlines", Table(columns, jobs, 2)))
    return found


def _pair(of: str, one: Answer, other: Answer, row: tuple[str, str, int]) -> list[str]:
    path, title, decimals = row
    return pair_row(
        (of, title), Line(of, title, lookup(one, path), decimals), Line(of, title, lookup(other, path), decimals)
    )


def _refusals(one: Answer, other: Answer) -> list[list[str]]:
    rows = []
    for slug, own in one["classes"].items():
        ours, theirs = own.get("refused") or {}, other["classes"].get(slug, {}).get("refused") or {}
        for reason in sorted({*ours, *theirs}):
            title = reason.replace("_", " ")
            rows.append(
                pair_row(
                    (slug, title), Line(slug, title, ours.get(reason, 0)), Line(slug, title, theirs.get(reason, 0))
                )
            )
    return rows


def _pool_sections(results: Mapping[str, Answer]) -> list[Section]:
    found = []
    pool = _across(POOL_FIGURES, results, "Figure")
    if pool.rows:
        found.append(Section("pool", "Loans and the pool", pool))
    (result,) = results.values()
    jobs = {job["job"]: job for job in result.get("jobs", ())}
    if jobs:
        found.append(Section("jobs", "Jobs and deadlines", _across(JOB_FIGURES, jobs, "Figure")))
    return found


def _variants(answer: Answer) -> Shown:
    rows = [
        [row["variant"], slug, *(say(lookup(own, path), decimals) for path, _, decimals in VARIANT_FIGURES)]
        for row in answer["rows"]
        for slug, own in row["classes"].items()
    ]
    columns = ("Variant", "Class", *(title for _, title, _ in VARIANT_FIGURES))
    p99 = [lookup(row, "classes.interactive.wait_ms_p99") for row in answer["rows"]]
    names = [row["variant"] for row in answer["rows"]]
    told = ", ".join(f"{name} {say(value)} ms" for name, value in zip(names, p99, strict=True))
    whole = [
        [
            row["variant"], say(row["preempted"]), say(row["lends"]), say(row["idle_slot_s"]),
            say(row["worst_tenant_wait_ms_p99"], 1), "; ".join(_job(job) for job in row["jobs"]) or say(None),
        ]
        for row in answer["rows"]
    ]  # fmt: skip
    sections = [
        Section(
            "waits", "Interactive wait, p99, by variant",
            chart=figures.bars(names, p99, unit="ms", horizontal=True, height_px=60 + 44 * len(names)),
            chart_text=f"Interactive wait p99: {told}.",
        ),
        Section("rows", "By variant and class", Table(columns, rows, 2)),
        Section(
            "pool", "Slots, loans and jobs",
            Table(("Variant", "Preempted", "Loans", "Idle, slot-s", "Worst tenant, wait p99, ms", "Jobs"), whole, 1),
        ),
    ]  # fmt: skip
    facts = _facts(
        ("Slots", f"{len(answer['bands'])}: " + ", ".join(_bands(answer["bands"]))), ("Service", answer["service"])
    )
    return Shown(facts, sections, notes=[answer["note"]])


def _job(job: Answer) -> str:
    verdict = {True: "met", False: "missed", None: "not decided"}[job["deadline_met"]]
    return f"{job['job']}: {say(job['done'])} of {say(job['items'])}, deadline {verdict}"


def _batching(answer: Answer) -> Shown:
    cells = answer["cells"]
    waits = sorted({cell["max_wait_ms"] for cell in cells if cell["max_batch_size"] > 1})
    sizes = sorted({cell["max_batch_size"] for cell in cells} - {1})
    by_key = {(cell["max_batch_size"], cell["max_wait_ms"]): cell for cell in cells}
    series = [
        figures.Series(f"batch {size}", [lookup(by_key.get((size, wait), {}), "p95_ms") for wait in waits])
        for size in sizes
    ]
    knee = next((cell for cell in cells if cell["knee"]), None)
    told = "" if knee is None else (
        f"The knee is a batch of {knee['max_batch_size']} that waits {knee['max_wait_ms']:g} ms at most: p95"
        f" {say(knee['p95_ms'], 1)} ms at {say(knee['throughput_per_s'], 1)}/s."
    )  # fmt: skip
    rows = [
        [
            say(cell["max_batch_size"]), say(cell["max_wait_ms"], 1), say(cell["p50_ms"], 1), say(cell["p95_ms"], 1),
            say(cell["p99_ms"], 1), say(cell["throughput_per_s"], 1), say(cell["mean_batch"], 2),
            "here" if cell["knee"] else "",
        ]
        for cell in cells
    ]  # fmt: skip
    columns = ("Batch", "Wait, ms", "p50, ms", "p95, ms", "p99, ms", "Throughput, /s", "Mean batch", "Knee")
    chart = figures.line_series([f"{wait:g} ms" for wait in waits], series, unit="ms") if series else None
    foot = "Knee: the least p95 of the cells with at least 95 % of the best throughput."
    return Shown(
        _facts(("Requests", answer["requests"]), ("Rate, /s", answer["rate"]), ("Workers", answer["workers"])),
        [Section("cells", "p95 by the longest wait", Table(columns, rows, 0), chart, told, foot)],
        notes=[answer["note"]],
    )


def _capacity(answer: Answer) -> Shown:
    needed = answer["needed_slots"]
    rows = [
        ["Slots that keep every objective and deadline", say(needed)],
        ["Slots that can lose one", say(answer.get("with_one_failed"))],
        ["Breaks first with one less", ", ".join(answer["breaks_first"]) or say(None)],
        ["Scaling signal: slots", say(lookup(answer, "signal.needed_slots"))],
        ["Scaling signal: demand, slots", say(lookup(answer, "signal.demand_slots"), 2)],
    ]
    notes = [answer["note"]] + ([] if needed is not None else ["No fleet that was tried keeps the objective."])
    return Shown([], [Section("fleet", "The fleet that it takes", Table(("Figure", "Value"), rows))], notes=notes)


def _offers(answer: Answer) -> Shown:
    requirement, fits = answer["requirement"], answer["feasible"]
    facts = _facts(("Needed", wanted_text(requirement)), ("Offers in the list", answer["listed"]))
    if requirement["measured_by"]:
        facts += _facts(("Measured", requirement["measured_by"]))
    rows = [
        [
            offer_name(row), row["price"], _lines(row), "; ".join(row["notes"]) or say(None),
            format_nanos(row["machine_hour_nanos"]), say(row["machines"]), say(row["spare_gpus"]),
            format_nanos(row["hour_nanos"]), money(row["total_nanos"]),
        ]
        for row in fits
    ]  # fmt: skip
    columns = (
        "Offer", "Price", "Line", "What is odd", "A machine, /h", "Machines", "GPUs to spare", "All of them, /h",
        f"{requirement['hours']:,} h",
    )  # fmt: skip
    first = fits[:OFFERS_CHARTED]
    chart = figures.bars(
        [f"{number}. {row['cloud']}" for number, row in enumerate(first, start=1)],
        [row["total_nanos"] / NANOS_PER_UNIT for row in first], unit="", decimals=0, horizontal=True,
        height_px=60 + 32 * len(first),
    ) if first else None  # fmt: skip
    told = "" if not first else f"The cheapest is {offer_name(first[0])}: {money(first[0]['total_nanos'])} in all."
    refused = [[offer_name(row), _lines(row), "; ".join(row["reasons"])] for row in answer["refused"]]
    left = [f"Line {row['line']} was left out: {row['reason']}" for row in answer["refused_lines"]]
    return Shown(
        facts,
        [
            Section(
                "fits", "Offers that meet it, the cheapest first", Table(columns, rows, 4), chart, told,
                "Machines are paid as a whole, in the currency of the list.",
            ),
            Section("refused", "Refused", Table(("Offer", "Line", "Why"), refused, 3)),
        ],
        notes=[answer["note"], *left],
    )  # fmt: skip


def _lines(row: Answer) -> str:
    return ", ".join(str(line) for line in row["lines"])


def _effect(answer: Answer) -> Shown:
    load = answer["load"]
    minutes = (load["to_s"] - load["from_s"]) / 60
    part = "all of it" if load["whole"] else (
        f"one stretch, {say(minutes, 1)} min from minute {say(load['from_s'] / 60, 1)}, drawn with seed"
        f" {answer['seed']}; deadlines that a part of the items met are not judged"
    )  # fmt: skip
    now, draft = answer["current"], answer["draft"]
    change = draft["charge_nanos"] - now["charge_nanos"]
    facts = _facts(
        ("Replayed", f"{say(load['replayed'])} of {say(load['recorded'])} requests and items: {part}"),
        ("Service", answer["service"]), ("Charges now", money(now["charge_nanos"])),
        ("Charges, draft", money(draft["charge_nanos"])), ("Change", money(change, signed=True)),
    )  # fmt: skip
    sections = _beside({"Now": now, "Draft": draft})
    sections.insert(1, _by_tenant(now, draft))
    foot = "Items of jobs are priced without cached prompts. Refused requests were not recorded, so none is replayed."
    return Shown(facts, sections, notes=[answer["note"], foot])


def _by_tenant(now: Answer, draft: Answer) -> Section:
    ours, theirs = ({(row["tenant"], row["class"]): row for row in one["rows"]} for one in (now, draft))
    keys = sorted({*ours, *theirs}, key=lambda key: (-_weight(ours.get(key), theirs.get(key)), key))
    rows = [_tenant_row(key, ours.get(key), theirs.get(key)) for key in keys[:TENANT_ROWS]]
    columns = (
        "Tenant", "Class", "Arrivals", "Refused, now", "Refused, draft", "Wait p95, now, ms", "Wait p95, draft, ms",
        "Wait p99, now, ms", "Wait p99, draft, ms", "Charges, now", "Charges, draft", "Change",
    )  # fmt: skip
    left = len(keys) - len(rows)
    foot = f"The largest changes first; {left:,} more rows are in the answer." if left > 0 else "Largest changes first."
    return Section("tenants", "By tenant and class", Table(columns, rows, 2), foot=foot)


def _charges(row: Answer | None) -> int:
    return 0 if row is None else row["charge_nanos"] + row["items_charge_nanos"]


def _weight(one: Answer | None, other: Answer | None) -> int:
    return abs(_charges(other) - _charges(one))


def _tenant_row(key: tuple[str, str], one: Answer | None, other: Answer | None) -> list[str]:
    def pair(read: Callable[[Answer], str]) -> list[str]:
        return [say(None) if row is None else read(row) for row in (one, other)]

    arrivals = next(row["arrivals"] for row in (one, other) if row is not None)
    return [
        *key, say(arrivals), *pair(lambda row: say(sum(row["refused"].values()))),
        *pair(lambda row: say(row["wait_ms"]["p95"], 1)), *pair(lambda row: say(row["wait_ms"]["p99"], 1)),
        *pair(lambda row: money(_charges(row))), money(_charges(other) - _charges(one), signed=True),
    ]  # fmt: skip


SHOWN: Final[Mapping[str, Callable[[Answer], Shown]]] = {
    "interference": _interference,
    "replay": _replay,
    "overload": _variants,
    "designs": _variants,
    "capacity": _capacity,
    "batching": _batching,
    "effect": _effect,
    "offers": _offers,
}
