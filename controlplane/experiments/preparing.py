"""From what a form or REST asked to what the lab takes: arguments and files that hold everything the answer needs.

A request prepares small questions itself, so that its form says what is wrong. What reads a pool's records or more than
LIGHT_ROWS rows is outlined by the request and prepared by a worker.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import msgspec
from django.core.exceptions import ValidationError

from controlplane.core.period import from_us, to_us
from controlplane.core.slots import ClassKind
from controlplane.experiments.models import Experiment
from controlplane.experiments.recorded import NothingRecorded, Recorded, policy_in_force, recorded, require_usage
from controlplane.fleet.models import Pool
from controlplane.lab import servegen, synthetic
from controlplane.lab.arguments import read_trace_use
from controlplane.lab.kinds import parse
from controlplane.lab.load_file import KeptLoad, load_as_bytes
from controlplane.lab.offer_list import read_offers
from controlplane.lab.scenario import read_use
from controlplane.lab.service import Constants
from controlplane.lab.traces import TraceError, TraceRequest
from controlplane.policy.compile import compile_configuration
from controlplane.policy.configuration import Configuration
from controlplane.wire.policy import PolicyDocument

T = TypeVar("T")
TRACE, JOB, LOAD, CURRENT, DRAFT = "trace.jsonl", "job.jsonl", "load.bin", "current.json", "draft.json"
OFFERS, MEASURED = "offers.csv", "capacity.json"
UPLOAD: Final = "upload"
"""An uploaded file until a worker read it."""
LIGHT_ROWS: Final = 5_000
LIGHT_BYTES: Final = 200_000
"""Of a trace file: about as many rows."""
ROWS_MAX: Final = {
    "interference": 20_000, "designs": 20_000, "capacity": 20_000, "overload": 50_000, "replay": 100_000,
}  # fmt: skip
"""Requests and items of one experiment, by how often its kind runs them."""
NOT_FITTED: Final = "Only recorded usage can be fitted. Choose a curve or enter constants."
EPOCH_US: Final = 1_798_761_600_000_000
"""Where traces without dates begin: 1 January 2027."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a question is made of. `source` is told on pages; `pool` and `draft_digest` are empty where it has none."""

    arguments: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    source: str = ""
    pool: str = ""
    draft_digest: str = ""


@dataclass(slots=True)
class _Traffic:
    requests: list[TraceRequest]
    items: list[TraceRequest]
    source: str
    service: Constants | None = None
    raw: bytes | None = None
    part: str = ""
    """What the lab reads of the file, as an argument says it."""


def prepare(kind: str, values: Mapping[str, Any], upload: bytes | None = None) -> Prepared:
    """Of all kinds but effects, from the form's cleaned `values`. Raises ValidationError, by field if it can."""
    if kind == "batching":
        return Prepared(_batching(values), source="Poisson arrivals")
    if kind == "offers":
        return _offers(values, upload)
    traffic = _traffic(values, upload)
    _not_too_many(kind, len(traffic.requests) + len(traffic.items))
    files = {TRACE: traffic.raw if traffic.raw is not None else _lines(traffic.requests)}
    arguments = _fleet(kind, values, traffic)
    if traffic.items:
        files[JOB] = _lines(traffic.items)
        deadline_h = values.get("deadline_h")
        arguments.append(f"--job={JOB}" + ("" if deadline_h is None else f":deadline_h={deadline_h:g}"))
    arguments.append(f"--trace={TRACE}{traffic.part}")
    return Prepared(arguments, files, traffic.source, values.get("pool") or "")


def _not_too_many(kind: str, rows: int) -> None:
    if rows > (most := ROWS_MAX[kind]):
        raise ValidationError(
            {"minutes": f"That is {rows:,} requests and items; this kind takes {most:,}. Choose a shorter time."}
        )


# ---- what a request does itself ----


def is_light(kind: str, values: Mapping[str, Any], upload: bytes | None) -> bool:
    """Whether preparing it takes a small part of a second."""
    if kind in ("batching", "offers"):
        return True
    source = values.get("source")
    if source == "file":
        small = len(upload or b"") <= LIGHT_BYTES and (values["batch_items"] or 0) <= LIGHT_ROWS
        # A line of client windows stands for thousands of requests.
        return small and servegen.COLUMN.encode() not in (upload or b"")[:1_000]
    return kind != "effect" and source != "usage" and _rows_drawn(values) <= LIGHT_ROWS


def outline(
    kind: str, values: Mapping[str, Any], now: datetime, upload: bytes | None = None, draft: Configuration | None = None
) -> Prepared:
    """What a worker makes the question from; an effect's `draft` is compiled where it is not given.

    Raises ValidationError for what can be told without reading it all.
    """
    if kind == "effect":
        return _outline_of_effect(values, draft or compile_configuration(now))
    source = values["source"]
    if values["service_model"] == "fitted" and source != "usage":
        raise ValidationError({"service_model": NOT_FITTED})
    if source == "usage":
        pool, since, until = pool_and_window(values)
        _asked_of(lambda: policy_in_force(pool))
        _asked_of(lambda: require_usage(pool, since, until))
        return Prepared([], source=window_text(pool, since, until), pool=pool.slug)
    if source == "file":
        name = values.get("file_name") or "of a trace"
        return Prepared([], {UPLOAD: upload or b""}, f"file {name}", values.get("pool") or "")
    _not_too_many(kind, _rows_drawn(values))
    return Prepared([], source=_drawn_text(values), pool=values.get("pool") or "")


def _rows_drawn(values: Mapping[str, Any]) -> int:
    """About how many rows synthetic traffic has."""
    return round(values["rate_per_s"] * values["minutes"] * 60) + (values["batch_items"] or 0)


def _batching(values: Mapping[str, Any]) -> list[str]:
    names = ("requests", "rate", "seed", "fixed_ms", "per_input_ms", "workers", "slow", "burst")
    return [f"--{name.replace('_', '-')}={values[name]:g}" if isinstance(values[name], float)
            else f"--{name.replace('_', '-')}={values[name]}" for name in names]  # fmt: skip


def _offers(values: Mapping[str, Any], upload: bytes | None) -> Prepared:
    """A price list, and what is required of it: a number of GPUs, or the answer of the test that measured it."""
    if upload is None:
        raise ValidationError({"file": "Choose a price list."})
    try:
        read_offers(upload)
    except TraceError as error:
        raise ValidationError({"file": f"{str(error)[:1].upper()}{str(error)[1:]}."}) from None
    files, source = {OFFERS: upload}, f"list {values.get('file_name') or 'of prices'}"
    arguments = [f"--offers={OFFERS}", f"--memory-gb={values['memory_gb']:g}", f"--hours={values['hours']}"]
    if values["experiment"] is None:
        arguments.append(f"--count={values['count']}")
    else:
        files[MEASURED] = _measured(values["experiment"])
        arguments += [f"--requirement={MEASURED}", f"--gpus-per-slot={values['gpus_per_slot']}"]
        source += f", measured by experiment {values['experiment']}"
    arguments += [
        f"--{name.replace('_', '-')}={values[name]}" for name in ("gpu", "region", "start_by") if values[name]
    ]
    arguments += [f"--{name.replace('_', '-')}" for name in ("one_node", "spot") if values[name]]
    return Prepared(arguments, files, source[:300])


def _measured(experiment_id: int) -> bytes:
    """The stored answer of a capacity test. Raises ValidationError for one that is not there."""
    row = Experiment.objects.select_related("result").filter(pk=experiment_id, kind=Experiment.Kind.CAPACITY).first()
    result = None if row is None else getattr(row, "result", None)
    content = b"" if result is None else bytes(result.content)
    if not content or json.loads(content).get("with_one_failed") is None:
        raise ValidationError({"experiment": "There is no such capacity test that is done and found a fleet."})
    return content


def _fleet(kind: str, values: Mapping[str, Any], traffic: _Traffic) -> list[str]:
    found = [
        f"--slots={values['slots']}", f"--per-slot={values['per_slot']}", f"--kv-tokens={values['kv_tokens']}",
        f"--floor=interactive={values['floor_interactive']}", f"--floor=batch={values['floor_batch']}",
        f"--objective-ms={values['objective_ms']:g}", f"--seed={values['seed']}", f"--tenants={values['tenants']}",
        *_service(values, traffic.service),
    ]  # fmt: skip
    if kind == "replay":
        found.append(f"--policy={values['policy']}")
        if values.get("against"):
            found.append(f"--against={values['against']}")
        if values.get("safe_rate"):
            found.append(f"--safe-rate={values['safe_rate']}")
        found += [f"--propose={line.strip()}" for line in (values.get("propose") or "").splitlines() if line.strip()]
        found += _conditions(values)
    else:
        found += [
            f"--target={values['target_percent'] / 100:g}", f"--quality-bound={values['quality_percent'] / 100:g}",
            f"--forecast={values['forecast']:g}",
        ]  # fmt: skip
    return found


def _conditions(values: Mapping[str, Any]) -> list[str]:
    """What goes wrong, of questions whose form asks for it; nothing where nothing does."""
    found = [f"--fail={text}" for text in (values.get("fail") or "").split()]
    if values.get("standby"):
        found.append(f"--standby={values['standby']}")
        if values["start_up_lag_s"] is not None:
            found.append(f"--start-up-lag-s={values['start_up_lag_s']:g}")
    if values.get("report_every_s") not in (None, 1):
        found.append(f"--report-every-s={values['report_every_s']:g}")
    if values.get("report_loss_percent"):
        found.append(f"--report-loss={values['report_loss_percent'] / 100:g}")
    return found


def _service(values: Mapping[str, Any], fitted: Constants | None) -> list[str]:
    model = values["service_model"]
    if model in ("h100", "a100"):
        return [f"--curve={model}"]
    if model == "fitted":
        if fitted is None:
            raise ValidationError({"service_model": NOT_FITTED})
        return [f"--service={fitted.described()}"]
    return [f"--service=base_ms={values['base_ms']:g},prompt_us={values['prompt_us']},output_us={values['output_us']}"]


# ---- traffic ----


def _traffic(values: Mapping[str, Any], upload: bytes | None) -> _Traffic:
    source = values["source"]
    if source == "usage":
        found = _usage(values)
    elif source == "file":
        found = _uploaded(values, upload)
    else:
        found = _synthetic(values)
    if values.get("batch_items"):
        rng = Random(values["seed"] + 1)  # noqa: S311  a simulation
        drawn = synthetic.requests(
            rate_per_s=1_000.0, variation=1.0, prompt=synthetic.CONVERSATION_PROMPT,
            output=synthetic.CONVERSATION_OUTPUT, rng=rng, prompt_max=32_000,
        )  # fmt: skip
        found.items.extend(islice(drawn, values["batch_items"]))
        found.source += f", and a job of {values['batch_items']:,} conversations"
    return found


def _synthetic(values: Mapping[str, Any]) -> _Traffic:
    code = values["source"] == "code"
    per_s, end_us = values["rate_per_s"], round(values["minutes"] * 60e6)
    drawn = synthetic.requests(
        rate_per_s=per_s, variation=1.5, prompt=synthetic.CODE_PROMPT if code else synthetic.CONVERSATION_PROMPT,
        output=synthetic.CODE_OUTPUT if code else synthetic.CONVERSATION_OUTPUT, rng=Random(values["seed"]),  # noqa: S311
        prompt_max=32_000,
    )  # fmt: skip
    most = max(ROWS_MAX.values()) + 1
    requests = []
    for request in islice(drawn, most):
        if request.at_us >= end_us:
            break
        requests.append(request)
    if not requests:
        raise ValidationError({"rate_per_s": "No request arrives in that time: raise the rate or the time."})
    return _Traffic(requests, [], _drawn_text(values))


def _drawn_text(values: Mapping[str, Any]) -> str:
    what = "code completion" if values["source"] == "code" else "conversations"
    return f"synthetic {what}, {values['rate_per_s']:g}/s for {values['minutes']:g} min, seed {values['seed']}"


def _uploaded(values: Mapping[str, Any], upload: bytes | None) -> _Traffic:
    if upload is None:
        raise ValidationError({"file": "Choose a trace file."})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TRACE
        path.write_bytes(upload)
        part = ""
        try:
            if servegen.has_windows(path):
                part = f":for_h={values['minutes'] / 60:g}"
            trace = read_use(read_trace_use(f"{path}{part}"), values["seed"])
        except (TraceError, ValueError) as error:
            raise ValidationError({"file": f"{error}."}) from None
    left = f", {len(trace.refused):,} lines left out" if trace.refused else ""
    source = f"file {values.get('file_name') or 'of a trace'} ({trace.format}), {len(trace.requests):,} requests{left}"
    return _Traffic(list(trace.requests), [], source[:300], raw=upload, part=part)


def _usage(values: Mapping[str, Any]) -> _Traffic:
    pool, since, until = pool_and_window(values)
    document = _asked_of(lambda: policy_in_force(pool))
    found = _asked_of(lambda: recorded(pool, document, since, until))
    batch = {klass.slug for klass in document.classes if klass.kind == ClassKind.BATCH}
    work = found.load.workload
    requests: list[TraceRequest] = []
    items: list[TraceRequest] = []
    for at, at_us in enumerate(work.at_us):
        row = TraceRequest(
            at_us, work.prompt[at], work.output[at], min(found.cached[at], work.prompt[at]),
            tenant=work.tenants[work.tenant_of[at]],
        )  # fmt: skip
        (items if work.classes[work.class_of[at]] in batch else requests).append(row)
    for job in found.load.jobs:
        items += [TraceRequest(0, *pair) for pair in zip(job.prompts, job.outputs, strict=True)]
    if not requests:
        raise ValidationError({"until": "Nothing interactive was served in that time: choose another window."})
    return _Traffic(requests, items, window_text(pool, since, until), service=_constants(found))


def _constants(found: Recorded) -> Constants | None:
    return found.service if isinstance(found.service, Constants) else None


def pool_and_window(values: Mapping[str, Any]) -> tuple[Pool, datetime, datetime]:
    """The pool and [since, until) of a form. Raises ValidationError for a pool that is not there."""
    pool = Pool.objects.filter(slug=values.get("pool") or "", archived_at__isnull=True).first()
    if pool is None:
        raise ValidationError({"pool": "Choose a pool."})
    until = datetime.fromisoformat(values["until"])
    return pool, until - timedelta(minutes=values["minutes"]), until


def window_text(pool: Pool, since: datetime, until: datetime) -> str:
    return f"usage of {pool.slug}, {since:%Y-%m-%d %H:%M:%S} to {until:%Y-%m-%d %H:%M:%S} UTC"


def _asked_of(read: Callable[[], T]) -> T:
    try:
        return read()
    except NothingRecorded as error:
        raise ValidationError({"until": f"{str(error)[:1].upper()}{str(error)[1:]}."}) from None


def _lines(requests: Iterable[TraceRequest]) -> bytes:
    """Our own form of a trace."""
    rows = []
    for request in requests:
        row: dict[str, Any] = {
            "at": from_us(EPOCH_US + request.at_us).isoformat(), "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
        }  # fmt: skip
        if request.tenant:
            row["tenant"] = request.tenant
        rows.append(json.dumps(row, separators=(",", ":")))
    return ("\n".join(rows) + "\n").encode()


# ---- the effect of a draft ----


def _outline_of_effect(values: Mapping[str, Any], configuration: Configuration) -> Prepared:
    """What is saved now, as a push would send it, and what is in force: both as they are when the question is asked."""
    pool, since, until = pool_and_window(values)
    document = _asked_of(lambda: policy_in_force(pool))
    _asked_of(lambda: require_usage(pool, since, until))
    draft = configuration.pools.get(pool.slug)
    if draft is None:
        raise ValidationError({"pool": "The draft has no such pool."})
    files = {CURRENT: msgspec.json.encode(document), DRAFT: msgspec.json.encode(draft)}
    return Prepared([], files, window_text(pool, since, until), pool.slug, configuration.digest)


def prepare_effect(values: Mapping[str, Any], files: Mapping[str, bytes]) -> Prepared:
    """With the load that the outline's policies are compared on. Raises ValidationError for one that is not there."""
    pool, since, until = pool_and_window(values)
    document = msgspec.json.decode(files[CURRENT], type=PolicyDocument)
    found = _asked_of(lambda: recorded(pool, document, since, until))
    kept = KeptLoad(found.load, to_us(since), found.cached)
    arguments = [
        f"--load={LOAD}", f"--current={CURRENT}", f"--draft={DRAFT}", f"--seed={values['seed']}",
        f"--rows-max={values['rows_max']}", f"--objective-ms={values['objective_ms']:g}",
    ]  # fmt: skip
    if (fitted := _constants(found)) is not None:
        arguments.append(f"--service={fitted.described()}")
    unknown = f"; {found.unknown:,} records of tenants or classes that it no longer has" if found.unknown else ""
    source = window_text(pool, since, until) + unknown
    return Prepared(arguments, {**files, LOAD: load_as_bytes(kept)}, source[:300], pool.slug)


def complete(kind: str, values: Mapping[str, Any], files: Mapping[str, bytes]) -> Prepared:
    """The worker's part: the whole question, from its parameters and the files of its outline.

    Raises ValidationError where the lab cannot take it.
    """
    prepared = prepare_effect(values, files) if kind == "effect" else prepare(kind, values, files.get(UPLOAD))
    checked(kind, prepared)
    return prepared


def checked(kind: str, prepared: Prepared) -> None:
    """The lab's own reading of the arguments. Raises ValidationError with its words."""
    try:
        parse(kind, prepared.arguments)
    except ValueError as error:
        raise ValidationError(f"{error}.") from None
