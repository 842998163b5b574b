"""What people type at the lab: traces, jobs, policies and their changes, read once. Errors say what to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import yaml

from controlplane.agent.backends.curves import CURVES, ServiceCurve
from controlplane.lab.policies import bands, changed, document_of
from controlplane.lab.reference import Rules
from controlplane.lab.scenario import REFERENCE, JobUse, TraceUse
from controlplane.lab.service import ServiceModel, Tables, read_service
from controlplane.wire.policy import PolicyDocument

ISOLATIONS: Final = ("shared", "reserved", "dedicated")
FILE_BYTES_MAX: Final = 1 << 20
POLICY_FIELDS: Final = frozenset(
    {"isolation", "slots", "places", "kv_tokens", "safe_rate", "weights", "prefill_us_per_token",
     "decode_us_per_token", "max_concurrency", "interactive", "batch", "flex"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Places:
    """The fleet of a question: `floors` by class kind; what is neither floor is the flex band."""

    slots: int
    per_slot: int
    floors: Mapping[str, int]
    kv_tokens: int = 0
    queue_bound: int | None = None
    safe_rate: Mapping[int, float] | None = None

    @property
    def banded(self) -> list[str]:
        """Bands of the slots; without floors half is interactive and a quarter batch."""
        interactive = self.floors.get("interactive", -(-self.slots // 2))
        batch = self.floors.get("batch", max(1, self.slots // 4) if self.slots > 1 else 0)
        if interactive + batch > self.slots:
            raise ValueError(f"the floors need {interactive + batch} slots, there are {self.slots}: see --floor")
        return bands(interactive, self.slots - interactive - batch, batch)


def _split(text: str, known: Mapping[str, Callable[[str], Any]], what: str) -> tuple[Path, dict[str, Any]]:
    """`FILE[:name=value]...`; a path may hold colons, for only what reads as one of the names is cut off."""
    path, found = text, {}
    while ":" in path:
        head, _, last = path.rpartition(":")
        name, equals, value = last.partition("=")
        if not equals or name not in known:
            break
        try:
            found[name] = known[name](value)
        except ValueError:
            raise ValueError(f"{what} {text}: {name}={value} is no number") from None
        path = head
    return Path(path), found


def read_trace_use(text: str) -> TraceUse:
    """`FILE[:class=C][:rate=2][:stretch=1.5][:from_h=H][:for_h=H][:format=F][:tokens=code]`"""
    known: dict[str, Callable[[str], Any]] = {
        "class": str, "rate": float, "stretch": float, "format": str, "from_h": float, "for_h": float, "tokens": str,
    }  # fmt: skip
    path, found = _split(text, known, "--trace")
    if found.get("from_h", 0.0) < 0 or found.get("for_h", 1.0) <= 0:
        raise ValueError(f"--trace {text}: from_h is 0 or more and for_h above 0")
    return TraceUse(path, found.pop("class", "interactive"), **found)


def read_job_use(text: str) -> JobUse:
    """`FILE[:deadline_h=8][:submitted_h=0][:copies=1][:tenant=T][:format=F]`"""
    known: dict[str, Callable[[str], Any]] = {
        "deadline_h": float, "submitted_h": float, "copies": int, "tenant": str, "format": str,
    }  # fmt: skip
    path, found = _split(text, known, "--job")
    if found.get("copies", 1) < 1:
        raise ValueError(f"--job {text}: copies is 1 or more")
    deadline_h = found.pop("deadline_h", None)
    return JobUse(path, deadline_h, **found)


def read_counts(texts: Sequence[str], known: Sequence[str]) -> dict[str, int]:
    """`interactive=4`, each name once."""
    found = {}
    for text in texts:
        name, _, count = text.partition("=")
        if name not in known or not count.isdigit():
            raise ValueError(f"{text} is none of {', '.join(f'{name}=N' for name in known)}")
        found[name] = int(count)
    return found


def read_safe_rate(text: str) -> dict[int, float]:
    """`4=8,8=16`: requests per second by slots that serve interactive."""
    try:
        pairs = [part.split("=") for part in text.split(",") if part]
        return {int(slots): float(rate) for slots, rate in pairs}
    except ValueError:
        raise ValueError(f"--safe-rate {text}: write slots=rate pairs, such as 4=8,8=16") from None


def read_changes(texts: Sequence[str]) -> dict[str, Any]:
    """`pool.flex.lend_p95_ms=150`; the value is JSON, or a word."""
    found = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ValueError(f"{text}: write path=value, such as pool.flex.lend_p95_ms=150")
        try:
            found[path] = json.loads(value)
        except json.JSONDecodeError:
            found[path] = value
    return found


def read_model(service: str | None, curve: str | None) -> ServiceModel:
    """The service model of `--service` or `--curve`."""
    if curve is not None:
        if curve.endswith(".json"):
            return Tables(_measured_curve(Path(curve)))
        if curve not in CURVES:
            raise ValueError(f"--curve {curve}: known are {', '.join(sorted(CURVES))}, or a FILE.json of `lab live`")
        return Tables(CURVES[curve])
    return read_service(service or "base_ms=50,prompt_us=125,output_us=30000")


def _measured_curve(path: Path) -> ServiceCurve:
    """The tables of an answer of `lab live --json`. Raises ValueError for a file without them."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ValueError(f"{path}: a curve has at most {FILE_BYTES_MAX} bytes")
    try:
        said = json.loads(path.read_bytes())
        tables = said.get("calibration") or said
        prefill, decode = (
            tuple((int(at), float(ms)) for at, ms in tables[name]) for name in ("prefill_ms", "decode_ms")
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: has no tables prefill_ms and decode_ms; `lab live --json` measures them") from None
    for table in (prefill, decode):
        if len(table) < 2 or any(low[0] >= high[0] for low, high in pairwise(table)) or min(ms for _, ms in table) <= 0:
            raise ValueError(f"{path}: a table has two points or more, ascending, with times above 0")
    return ServiceCurve(path.stem, prefill, decode)


def read_policy(
    name: str, places: Places, tenants: Sequence[str], changes: Mapping[str, Any]
) -> Rules | PolicyDocument:
    """A named policy on the given places, or one of a file, with changes by path."""
    if name in REFERENCE:
        if changes:
            raise ValueError(f"{name} is the reference model: it has nothing to change")
        floor = places.floors.get("interactive", 0)
        total = places.slots * places.per_slot
        return Rules(total, priority=name == "priority", interactive_floor=floor, queue_bound=places.queue_bound)
    if name in ISOLATIONS:
        bound = {} if places.queue_bound is None else {"max_queue": places.queue_bound}
        document = document_of(
            places.banded, tenants, places=places.per_slot, kv_tokens=places.kv_tokens, isolation=name,
            safe_rate=places.safe_rate, interactive=bound,
        )  # fmt: skip
    else:
        document = _of_file(Path(name), tenants)
    return changed(document, changes) if changes else document


def _of_file(path: Path, tenants: Sequence[str]) -> PolicyDocument:
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path}: a policy is one of {', '.join((*REFERENCE, *ISOLATIONS))} or a YAML file")
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ValueError(f"{path}: a policy file has at most {FILE_BYTES_MAX} bytes")
    try:
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {str(error).splitlines()[0]}") from None
    if not isinstance(said, dict) or not isinstance(said.get("slots"), dict):
        raise ValueError(f"{path}: a policy names its slots, such as slots: {{interactive: 4, flex: 2, batch: 2}}")
    unknown = sorted(set(map(str, said)) - POLICY_FIELDS)
    if unknown:
        raise ValueError(f"{path}: unknown {', '.join(unknown)}; known are {', '.join(sorted(POLICY_FIELDS))}")
    slots = {str(kind): int(count) for kind, count in said.pop("slots").items()}
    if set(slots) - {"interactive", "flex", "batch"}:
        raise ValueError(f"{path}: slots are interactive, flex and batch")
    banded = bands(slots.get("interactive", 0), slots.get("flex", 0), slots.get("batch", 0))
    try:
        return document_of(banded, tenants, **said)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None
