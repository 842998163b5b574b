"""Contracts as OpenSLO documents (openslo/v1, kind SLO), and back; what cannot be carried is said, never guessed.

An SLO of ours names its metric in `indicator.spec.thresholdMetric.metricSource` of type `flexband`; its `timeWindow` is
the period of the error budget. What OpenSLO has no field for (verdict window, population, load limit, least number of
events, wall-clock deadlines) stands in the metric source's spec, which belongs to the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import time
from decimal import Decimal, InvalidOperation
from typing import Any

import yaml

from controlplane.contracts.models import Contract, ContractVersion

API_VERSION = "openslo/v1"
SOURCE = "flexband"
TEXT_BYTES_MAX = 256 * 1024
DOCUMENTS_MAX = 200
PPM = 1_000_000
_UNITS = {"m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400}
_TIMES = {"admittedBefore": "admitted_before", "finishedBy": "finished_by"}
_NUMBERS = {"minEvents": "min_events", "firstAttemptWithinSeconds": "first_attempt_within_s"}


class Unreadable(ValueError):
    """The text is no list of OpenSLO documents; the message says where it stops making sense."""


@dataclass
class Read:
    """One SLO of a text: what `create_contract` takes, what was left out, and what keeps it from being taken."""

    slug: str
    name: str = ""
    class_slug: str = ""
    tenant_slug: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# ---- export ----


def document(contract: Contract, version: ContractVersion) -> dict[str, Any]:
    """One contract as an SLO."""
    spec: dict[str, Any] = {"class": contract.workload_class.slug, "population": str(version.population)}
    if contract.tenant is not None:
        spec["tenant"] = contract.tenant.slug
    objective: dict[str, Any] = {"target": version.target_ppm / PPM}
    if version.objective == ContractVersion.Objective.DEADLINE:
        spec |= {"metric": "deadline", "zone": version.zone}
        for ours, theirs in (("admitted_before", "admittedBefore"), ("finished_by", "finishedBy")):
            at = getattr(version, ours)
            spec[theirs] = None if at is None else at.strftime("%H:%M")
        if version.first_attempt_within_s is not None:
            spec["firstAttemptWithinSeconds"] = version.first_attempt_within_s
    else:
        spec |= {"metric": str(version.metric), "unit": "ms", "window": _duration(version.window_s)}
        spec["minEvents"] = version.min_events
        if version.load_limit_per_s is not None:
            spec["loadLimitPerSecond"] = version.load_limit_per_s
        objective |= {"op": "lte", "value": version.threshold_ms}
    return {
        "apiVersion": API_VERSION,
        "kind": "SLO",
        "metadata": {"name": contract.slug, "displayName": contract.name or contract.slug},
        "spec": {
            "service": contract.workload_class.slug,
            "indicator": {
                "metadata": {"name": f"{contract.slug}-indicator"},
                "spec": {"thresholdMetric": {"metricSource": {"type": SOURCE, "spec": spec}}},
            },
            "timeWindow": [{"duration": _duration(version.budget_period_s), "isRolling": True}],
            "budgetingMethod": "Occurrences",
            "objectives": [objective],
        },
    }


def text_of(documents: Iterable[Mapping[str, Any]]) -> str:
    """The documents as one YAML text."""
    return yaml.safe_dump_all([dict(one) for one in documents], sort_keys=False, explicit_start=True)


def _duration(seconds: int) -> str:
    for unit in ("d", "h", "m"):
        if seconds % _UNITS[unit] == 0:
            return f"{seconds // _UNITS[unit]}{unit}"
    return f"{seconds}s"


# ---- import ----


def read(text: str) -> list[Read]:
    """The SLOs of a text, in its order; documents of other kinds are listed with what becomes of them.

    Raises Unreadable for what is no YAML, too large, or holds no document.
    """
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise Unreadable(f"The text has more than {TEXT_BYTES_MAX // 1024} KiB: import it in parts.")
    try:
        aliased = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text))
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise Unreadable(
            f"This is no YAML{where}: {getattr(error, 'problem', None) or 'it nests too deep'}."
        ) from error
    if aliased:
        raise Unreadable("It uses aliases (*name): write their values out.")
    if not documents:
        raise Unreadable("There is no document in it.")
    if len(documents) > DOCUMENTS_MAX:
        raise Unreadable(f"It has {len(documents)} documents; import at most {DOCUMENTS_MAX} at once.")
    found = [_read_one(one, number) for number, one in enumerate(documents, 1)]
    seen: set[str] = set()
    for one in found:
        if one.slug in seen:
            one.problems.append("Another document of this text has the same name.")
        seen.add(one.slug)
    return found


def _read_one(one: Any, number: int) -> Read:
    if not isinstance(one, dict):
        return Read(f"document {number}", problems=["It is no mapping with apiVersion, kind, metadata and spec."])
    metadata = _part(one, "metadata")
    slug = str(metadata.get("name") or f"document {number}")[:63]
    found = Read(slug, name=str(metadata.get("displayName") or slug)[:120])
    if one.get("kind") != "SLO":
        found.problems.append(
            f"Kind {one.get('kind')!s:.40} is not imported: a contract is one SLO with its indicator inside."
        )
        return found
    if one.get("apiVersion") != API_VERSION:
        found.problems.append(f"apiVersion {one.get('apiVersion')!s:.40} is not {API_VERSION}.")
        return found
    spec = _part(one, "spec")
    _read_window(spec, found)
    _read_objective(spec, found)
    _read_indicator(spec, found)
    if spec.get("alertPolicies"):
        found.left_out.append("alertPolicies: burn and absence alerts follow from the target.")
    for name in ("labels", "annotations"):
        if metadata.get(name):
            found.left_out.append(f"metadata.{name}")
    if spec.get("description"):
        found.left_out.append("description")
    return found


def _part(one: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = one.get(name)
    return value if isinstance(value, dict) else {}


def _read_window(spec: Mapping[str, Any], found: Read) -> None:
    method = spec.get("budgetingMethod", "Occurrences")
    if method != "Occurrences":
        found.problems.append(
            f"budgetingMethod {method!s:.40}: a contract counts requests (Occurrences), not slices of time."
        )
    windows = spec.get("timeWindow")
    window = windows[0] if isinstance(windows, list) and len(windows) == 1 and isinstance(windows[0], dict) else None
    if window is None:
        found.problems.append("timeWindow: give exactly one window; it becomes the period of the error budget.")
        return
    if not window.get("isRolling"):
        found.problems.append("timeWindow: calendar windows cannot be carried; set isRolling: true.")
    seconds = _seconds(window.get("duration"))
    if seconds is None:
        found.problems.append(
            f"timeWindow: {window.get('duration')!s:.40} is no duration in m, h, d or w, such as 30d."
        )
    else:
        found.values["budget_period_s"] = seconds


def _seconds(duration: Any) -> int | None:
    text = str(duration or "")
    if len(text) > 9 or not text[:-1].isdecimal() or text[-1:] not in _UNITS:
        return None
    return int(text[:-1]) * _UNITS[text[-1]]


def _read_objective(spec: Mapping[str, Any], found: Read) -> None:
    objectives = spec.get("objectives")
    if not isinstance(objectives, list) or len(objectives) != 1 or not isinstance(objectives[0], dict):
        found.problems.append("objectives: a contract has exactly one; write one SLO for each.")
        return
    objective = objectives[0]
    target = _decimal(objective.get("target"))
    if target is None and (percent := _decimal(objective.get("targetPercent"))) is not None:
        target = percent / 100
    ppm = None if target is None else target * PPM
    if ppm is None or ppm != int(ppm) or not 0 < ppm < PPM:
        found.problems.append("objectives: target must lie between 0 and 1, in steps of a millionth, such as 0.99.")
    else:
        found.values["target_ppm"] = int(ppm)
    if objective.get("op") not in (None, "lte"):
        found.problems.append(
            f"objectives: op {objective['op']!s:.40} cannot be carried; a threshold includes its value (lte)."
        )
    if "value" in objective:
        value = _decimal(objective["value"])
        if value is None or value != int(value) or not 0 < value < 2**31:
            found.problems.append("objectives: value must be whole milliseconds.")
        else:
            found.values["threshold_ms"] = int(value)
    for name in ("timeSliceTarget", "timeSliceWindow", "compositeWeight"):
        if name in objective:
            found.problems.append(f"objectives: {name} cannot be carried.")


def _decimal(value: Any) -> Decimal | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() and abs(number) < Decimal(10) ** 12 else None


def _read_indicator(spec: Mapping[str, Any], found: Read) -> None:
    indicator = _part(spec, "indicator")
    source = _part(_part(_part(indicator, "spec"), "thresholdMetric"), "metricSource")
    if spec.get("indicatorRef"):
        found.problems.append("indicatorRef: write the indicator inside the SLO.")
        return
    if source.get("type") != SOURCE:
        said = f"a source of type {source.get('type')!s:.40}" if source else "no thresholdMetric"
        found.problems.append(
            f"indicator: it has {said}; its query cannot be carried. Write metricSource with type: {SOURCE} and spec "
            "with metric (queue_wait, ttft, tpot, e2e or deadline), class and unit: ms."
        )
        return
    ours = _part(source, "spec")
    found.class_slug = str(ours.get("class") or spec.get("service") or "")[:63]
    found.tenant_slug = str(ours.get("tenant") or "")[:63]
    metric = ours.get("metric")
    if metric == "deadline":
        found.values |= {"objective": "deadline", "zone": str(ours.get("zone") or "UTC")[:64]}
        found.values.pop("threshold_ms", None)
    elif metric in ContractVersion.Metric.values:
        found.values |= {"objective": "latency", "metric": metric}
        if ours.get("unit") != "ms":
            found.problems.append("indicator: say unit: ms, so that no value is read a thousand times too large.")
    else:
        found.problems.append(f"indicator: metric {metric!s:.40} is none of queue_wait, ttft, tpot, e2e and deadline.")
    _read_ours(ours, found)


def _read_ours(ours: Mapping[str, Any], found: Read) -> None:
    """What only our own metric source says."""
    if (population := ours.get("population")) is not None:
        found.values["population"] = str(population)[:10]
    if (window := ours.get("window")) is not None:
        seconds = _seconds(window)
        if seconds is None:
            found.problems.append(f"indicator: window {window!s:.40} is no duration in m, h, d or w, such as 15m.")
        else:
            found.values["window_s"] = seconds
    for theirs, name in _NUMBERS.items():
        if (value := ours.get(theirs)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
                found.problems.append(f"indicator: {theirs} must be a whole number.")
            else:
                found.values[name] = value
    if (limit := _decimal(ours.get("loadLimitPerSecond"))) is not None:
        found.values["load_limit_per_s"] = float(limit)
    for theirs, name in _TIMES.items():
        if (text := ours.get(theirs)) is not None:
            at = _clock(text)
            if at is None:
                found.problems.append(f"indicator: {theirs} must be a time of day in quotes, such as '06:00'.")
            else:
                found.values[name] = at


def _clock(text: Any) -> time | None:
    # YAML 1.1 reads an unquoted 20:00 as the number 1200.
    if not isinstance(text, str):
        return None
    try:
        return time.fromisoformat(text)
    except ValueError:
        return None
