"""What a draft of a policy would have done to a recorded load, beside the policy in force: waits, refusals, loans,
deadlines and charges, by tenant and class.

Both run at once, each in a process of its own. Charges are those of the book: each completed request by the card of
the class that served it, priced as the ledger prices.
"""

from __future__ import annotations

import multiprocessing
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from controlplane.core.pricing import RateCard, charge
from controlplane.lab.arguments import read_model
from controlplane.lab.interference import say
from controlplane.lab.items import JobSpec
from controlplane.lab.load_file import KeptLoad, Stretch, read_load, stretch_of
from controlplane.lab.report import COMPLETED, NO_GPU, report
from controlplane.lab.scenario import Load, effects, simulate
from controlplane.lab.service import ServiceModel
from controlplane.lab.simulator import Simulator
from controlplane.lab.summary import distribution
from controlplane.lab.watching import Watch
from controlplane.lab.workload import Workload
from controlplane.wire.policy import PolicyDocument

ROWS_MAX: Final = 20_000
NOT_IN_POLICY: Final = "not_in_policy"
"""A request of a tenant or class that the policy does not have; the agent would know no such key."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--load", required=True, type=Path, help="a recorded load")
    parser.add_argument("--current", required=True, type=Path, help="the policy in force, JSON as agents get it")
    parser.add_argument("--draft", required=True, type=Path, help="the policy that is proposed")
    parser.add_argument("--service", help="base_ms=,prompt_us=,output_us=")
    parser.add_argument("--curve")
    parser.add_argument("--objective-ms", type=float)
    parser.add_argument("--rows-max", type=int, default=ROWS_MAX, help="a larger load is cut to one stretch of it")
    parser.add_argument("--seed", type=int, default=0, help="draws where the stretch lies")


@dataclass(frozen=True, slots=True)
class Question:
    """One policy on one load."""

    document: PolicyDocument
    kept: KeptLoad
    service: ServiceModel
    objective_ms: float | None
    sampled: bool


def effect(options: Mapping[str, Any]) -> dict[str, Any]:
    """Both results, their difference, and what was left out. Raises ValueError and OSError for unusable files."""
    if options["rows_max"] < 1:
        raise ValueError("--rows-max is 1 or more")
    kept = read_load(options["load"].read_bytes())
    documents = [_document(options[name]) for name in ("current", "draft")]
    part = stretch_of(kept, options["rows_max"], options["seed"])
    service = read_model(options["service"], options["curve"])
    first, second = (
        Question(document, part.kept, service, options["objective_ms"], not part.whole) for document in documents
    )
    now, then = _both(first, second, options.get("watch"))
    return {
        "note": NO_GPU,
        "seed": options["seed"],
        "service": service.described(),
        "objective_ms": options["objective_ms"],
        "pool": documents[0].pool.slug,
        "load": _told(part),
        "current": now,
        "draft": then,
        "effects": effects(now, then),
    }


def _document(path: Path) -> PolicyDocument:
    try:
        return msgspec.json.decode(path.read_bytes(), type=PolicyDocument)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path.name} is no policy: {error}") from None


def _told(part: Stretch) -> dict[str, Any]:
    return {
        "recorded": part.recorded, "replayed": part.replayed, "whole": part.whole,
        "from_s": part.from_us / 1e6, "to_s": part.to_us / 1e6,
        "requests": len(part.kept.load.workload), "items": sum(len(job.prompts) for job in part.kept.load.jobs),
    }  # fmt: skip


def _both(first: Question, second: Question, watch: Watch | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The second in a forked process, so that two cores are used; its failure is raised here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    other = context.Process(target=_send, args=(sender, second), daemon=True)
    other.start()
    sender.close()
    try:
        found = answer_of(first, watch)
        theirs = receiver.recv()
    except EOFError:
        raise ValueError("the run of the draft ended early: there was not enough memory") from None
    finally:
        receiver.close()
        other.join(5)
        if other.is_alive():
            other.kill()
    if isinstance(theirs, str):
        raise ValueError(f"the draft cannot be run: {theirs}")
    return found, theirs


def _send(sender: Connection, question: Question) -> None:
    try:
        sender.send(answer_of(question, None))
    except (ValueError, KeyError) as error:
        sender.send(str(error))


def answer_of(question: Question, watch: Watch | None) -> dict[str, Any]:
    """One policy's part: the report without its histograms, `rows` by tenant and class, and what was charged."""
    given, cached, unknown = _known(question)
    simulator = Simulator(question.document, given.workload, question.service, start_us=question.kept.start_us)
    control = simulate(simulator, given, watch=watch)
    found = report(simulator, control, objective_ms=question.objective_ms, by_tenant=False)
    del found["service"]
    for job in found["jobs"]:
        if question.sampled and job["deadline_met"]:
            # A part of its items within all of its time: that proves nothing.
            job["deadline_met"] = None
    rows = _rows(simulator, cached, unknown)
    _add_items(rows, simulator, control.items.jobs)
    found["rows"] = [rows[key] for key in sorted(rows)]
    found["charge_nanos"] = sum(row["charge_nanos"] + row["items_charge_nanos"] for row in found["rows"])
    found["not_in_policy"] = sum(unknown.values())
    found["revision"] = question.document.revision
    return found


def _known(question: Question) -> tuple[Load, list[int], Counter[tuple[str, str]]]:
    """The load without tenants and classes that the policy does not have, which are counted."""
    kept, document = question.kept, question.document
    tenants, classes = ({row.slug for row in rows} for rows in (document.tenants, document.classes))
    work, unknown = kept.load.workload, Counter[tuple[str, str]]()
    keep, jobs = [], []
    for at, (tenant_index, class_index) in enumerate(zip(work.tenant_of, work.class_of, strict=True)):
        tenant, class_slug = work.tenants[tenant_index], work.classes[class_index]
        if tenant in tenants and class_slug in classes:
            keep.append(at)
        else:
            unknown[tenant, class_slug] += 1
    for job in kept.load.jobs:
        if job.tenant in tenants and job.class_slug in classes:
            jobs.append(job)
        else:
            unknown[job.tenant, job.class_slug] += len(job.prompts)
    cached = kept.cached or [0] * len(work)
    return Load(_only(work, keep, tenants, classes), tuple(jobs)), [cached[at] for at in keep], unknown


def _only(work: Workload, keep: list[int], tenants: set[str], classes: set[str]) -> Workload:
    """The requests at `keep`, whose tenants and classes are all known, with indexes into the known ones."""
    class_at = {slug: at for at, slug in enumerate(slug for slug in work.classes if slug in classes)}
    tenant_at = {slug: at for at, slug in enumerate(slug for slug in work.tenants if slug in tenants)}
    columns = {
        name: [getattr(work, name)[at] for at in keep] for name in ("at_us", "prompt", "output", "asked", "tail_100ns")
    }
    return Workload(
        tuple(class_at),
        tuple(tenant_at),
        class_of=[class_at[work.classes[work.class_of[at]]] for at in keep],
        tenant_of=[tenant_at[work.tenants[work.tenant_of[at]]] for at in keep],
        **columns,
    )


def _row(tenant: str, class_slug: str) -> dict[str, Any]:
    return {
        "tenant": tenant, "class": class_slug, "arrivals": 0, "completed": 0, "refused": {},
        "wait_ms": {"p50": None, "p95": None, "p99": None}, "gpu_s": 0.0, "charge_nanos": 0, "items_done": 0,
        "items_charge_nanos": 0,
    }  # fmt: skip


def _rows(
    simulator: Simulator, cached: list[int], unknown: Counter[tuple[str, str]]
) -> dict[tuple[str, str], dict[str, Any]]:
    """By tenant and class as asked for."""
    work, columns = simulator.workload, simulator.columns
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if len(work):
        started, arrived, gpu_us = (
            np.frombuffer(getattr(columns, name), np.int64) for name in ("started_us", "arrived_us", "gpu_us")
        )
        code = np.frombuffer(columns.code, np.int8)
        group = np.asarray(work.class_of, np.int64) * len(work.tenants) + np.asarray(work.tenant_of, np.int64)
        for number in np.unique(group):
            own = group == number
            class_index, tenant_index = divmod(int(number), len(work.tenants))
            pair = work.tenants[tenant_index], work.classes[class_index]
            waits = distribution((started - arrived)[own & (started >= 0)], 1_000)
            rows[pair] = _row(*pair) | {
                "arrivals": int(own.sum()), "completed": int((own & (code == COMPLETED)).sum()),
                "wait_ms": {name: waits[name] for name in ("p50", "p95", "p99")},
                "gpu_s": float(gpu_us[own].sum()) / 1e6,
            }  # fmt: skip
        _add_charges(rows, simulator, cached)
    for (tenant, class_slug, reason), count in sorted(simulator.refused.items()):
        rows[tenant, class_slug]["refused"][reason.value] = count
    for pair, count in sorted(unknown.items()):
        row = rows.setdefault(pair, _row(*pair))
        row["arrivals"] += count
        row["refused"][NOT_IN_POLICY] = count
    return rows


def _add_charges(rows: dict[tuple[str, str], dict[str, Any]], simulator: Simulator, cached: list[int]) -> None:
    work, columns, queues = simulator.workload, simulator.columns, simulator.scheduler.classes
    for at, code in enumerate(columns.code):
        if code != COMPLETED:
            continue
        served = queues[columns.served[at]].spec.slug
        card = simulator.registry.card_at(served, columns.arrived_us[at])
        nanos = _nanos(card, work.prompt[at], cached[at], columns.output[at], columns.gpu_us[at], simulator, served)
        rows[work.tenants[work.tenant_of[at]], work.classes[work.class_of[at]]]["charge_nanos"] += nanos


def _nanos(
    card: RateCard, prompt: int, cached: int, output: int, gpu_us: int, simulator: Simulator, served: str
) -> int:
    lines = charge(
        card, prompt_tokens=prompt, cached_tokens=min(cached, prompt), output_tokens=output, gpu_us=gpu_us,
        batch=simulator.registry.is_batch(served),
    )  # fmt: skip
    return lines.total_nanos


def _add_items(rows: dict[tuple[str, str], dict[str, Any]], simulator: Simulator, jobs: Any) -> None:
    """Items that were done, priced without cached prompts, which their records do not tell of what did not run."""
    for job in jobs:
        spec: JobSpec = job.spec
        row = rows.setdefault((spec.tenant, spec.class_slug), _row(spec.tenant, spec.class_slug))
        for at, code in enumerate(job.columns.code):
            if code == COMPLETED:
                card = simulator.registry.card_at(spec.class_slug, job.columns.arrived_us[at])
                row["items_done"] += 1
                row["items_charge_nanos"] += _nanos(
                    card, spec.prompts[at], 0, job.columns.output[at], job.columns.gpu_us[at], simulator,
                    spec.class_slug,
                )  # fmt: skip
        row["gpu_s"] += float(np.frombuffer(job.columns.gpu_us, np.int64).sum()) / 1e6


def text(answer: Mapping[str, Any]) -> str:
    load = answer["load"]
    lines = [
        f"{answer['pool']}: {load['replayed']:,} of {load['recorded']:,} requests and items; {answer['service']}",
        answer["note"], "",
        f"{'':<32}{'figure':<32}{'now':>14}{'draft':>14}",
    ]  # fmt: skip
    lines += [
        f"{row['of'][:30]:<32}{row['figure']:<32}{say(row['current']):>14}{say(row['proposed']):>14}"
        for row in answer["effects"]
    ]
    nanos = [answer[name]["charge_nanos"] / 1e9 for name in ("current", "draft")]
    return "\n".join([*lines, f"{'all':<32}{'charges':<32}{nanos[0]:>14,.2f}{nanos[1]:>14,.2f}"])
