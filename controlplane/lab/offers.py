"""`lab offers`: which machines for hire meet a measured requirement, the cheapest first, and why the others do not.

Nothing is asked of a provider and nothing is reserved: prices and stock are those of the list. What a list does not say
of something that is required counts against the offer, with that as its reason.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from math import ceil
from pathlib import Path
from typing import Any, Final

from controlplane.core.money import format_nanos
from controlplane.lab.offer_list import Offer, read_offers, words_of

NOTE: Final = "Prices are those of the list: nothing was asked of a provider, and nothing is reserved"
GPUS_MAX: Final = 100_000
HOURS_MAX: Final = 100_000
GPUS_A_SLOT_MAX: Final = 64


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--offers", required=True, type=Path, metavar="FILE.csv", help="a list of prices")
    parser.add_argument("--gpu", default="", help="type, such as H100 or 'A100 (80 GB)'; empty: any")
    parser.add_argument("--memory-gb", type=float, default=0.0, help="of one GPU, at least")
    parser.add_argument("--count", type=int, help="GPUs that are needed")
    parser.add_argument(
        "--requirement", type=Path, metavar="FILE.json",
        help="an answer of `lab capacity --json`: as many slots as can lose one",
    )  # fmt: skip
    parser.add_argument("--gpus-per-slot", type=int, default=1, help="GPUs of one slot of that answer")
    parser.add_argument("--one-node", action="store_true", help="all of them in one machine")
    parser.add_argument("--hours", type=int, default=730, help="for how long; a month is 730")
    parser.add_argument("--region", default="", help="as the list spells it")
    parser.add_argument("--start-by", type=date.fromisoformat, metavar="DAY", help="latest start, 2026-12-01")
    parser.add_argument("--spot", action="store_true", help="spot prices too: such machines can be taken away")


@dataclass(frozen=True, slots=True)
class Requirement:
    """What has to be there."""

    count: int
    gpu: str = ""
    memory_gb: float = 0.0
    one_node: bool = False
    hours: int = 730
    region: str = ""
    start_by: date | None = None
    spot: bool = False
    measured_by: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= GPUS_MAX or not 1 <= self.hours <= HOURS_MAX or self.memory_gb < 0:
            raise ValueError(
                f"--count is 1 to {GPUS_MAX:,} GPUs, --hours 1 to {HOURS_MAX:,}, and --memory-gb is not negative"
            )
        if not self.gpu and not self.memory_gb:
            raise ValueError("name what is needed: --gpu TYPE, or --memory-gb of one GPU")


def requirement_of(options: Mapping[str, Any]) -> Requirement:
    """From arguments. Raises ValueError for numbers that make no sense, OSError for a file that is not there."""
    count, measured_by = options["count"], ""
    if options["requirement"] is not None:
        if count is not None:
            raise ValueError("--count and --requirement both say how many: give one")
        count, measured_by = _measured(options["requirement"], options["gpus_per_slot"])
    if count is None:
        raise ValueError("say how many GPUs with --count, or name a measured --requirement")
    return Requirement(
        count, options["gpu"].strip(), options["memory_gb"], options["one_node"], options["hours"],
        options["region"].strip(), options["start_by"], options["spot"], measured_by,
    )  # fmt: skip


def _measured(path: Path, gpus_per_slot: int) -> tuple[int, str]:
    if not 1 <= gpus_per_slot <= GPUS_A_SLOT_MAX:
        raise ValueError(f"--gpus-per-slot is 1 to {GPUS_A_SLOT_MAX}")
    try:
        answer = json.loads(path.read_bytes())
    except ValueError:
        raise ValueError(f"{path}: is no JSON; write one with `lab capacity --json`") from None
    slots = answer.get("with_one_failed") if isinstance(answer, dict) else None
    if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
        raise ValueError(f"{path}: says no number of slots that can lose one; write one with `lab capacity --json`")
    return slots * gpus_per_slot, f"{slots} slots that can lose one, {_gpus(gpus_per_slot)} each"


def offers(options: Mapping[str, Any]) -> dict[str, Any]:
    """The requirement, what meets it from the cheapest on, and the reasons of the others.

    Raises TraceError for an unusable list.
    """
    wanted = requirement_of(options)
    listed = read_offers(options["offers"].read_bytes())
    feasible, refused = [], []
    for offer in listed.offers:
        reasons = refusals(offer, wanted)
        if reasons:
            refused.append({**_told(offer), "reasons": reasons})
        else:
            feasible.append(_priced(offer, wanted))
    feasible.sort(key=lambda row: (row["total_nanos"], row["spare_gpus"], row["machines"], row["lines"]))
    for rank, row in enumerate(feasible, start=1):
        row["rank"] = rank
    return {
        "note": NOTE,
        "requirement": {
            "count": wanted.count, "gpu": wanted.gpu or None, "memory_gb": wanted.memory_gb or None,
            "one_node": wanted.one_node, "hours": wanted.hours, "region": wanted.region or None,
            "start_by": None if wanted.start_by is None else wanted.start_by.isoformat(), "spot": wanted.spot,
            "measured_by": wanted.measured_by or None,
        },
        "listed": len(listed.offers),
        "feasible": feasible,
        "refused": refused,
        "refused_lines": [{"line": bad.line, "reason": bad.reason} for bad in listed.refused],
    }  # fmt: skip


def refusals(offer: Offer, wanted: Requirement) -> list[str]:
    """Every reason against an offer; none when it meets the requirement."""
    found = []
    if wanted.gpu and (why := _other_gpu(offer, wanted.gpu)):
        found.append(why)
    if wanted.memory_gb:
        if offer.memory_gb is None:
            found.append("the list does not say the memory of its GPUs")
        elif offer.memory_gb < wanted.memory_gb:
            found.append(f"a GPU has {offer.memory_gb:g} GB, {wanted.memory_gb:g} are needed")
    if wanted.one_node and offer.gpus < wanted.count:
        found.append(f"a machine has {_gpus(offer.gpus)}, {wanted.count:,} are needed in one")
    if wanted.region and offer.region.casefold() != wanted.region.casefold():
        found.append(f"it is in {offer.region}" if offer.region else "the list does not say its region")
    if wanted.start_by is not None and (offer.start is None or offer.start > wanted.start_by):
        said = "the list does not say when it can start"
        found.append(said if offer.start is None else f"it can start on {offer.start}, after {wanted.start_by}")
    if _price(offer, wanted) is None:
        found.append(_unpriced(offer))
    return found


def _other_gpu(offer: Offer, gpu: str) -> str:
    """`A100` is asked for: an A100 of any memory will do, and no A10. Empty where the offer's GPU is meant."""
    words, memory_gb = words_of(gpu)
    if not words <= offer.words or (memory_gb is not None and memory_gb != offer.memory_gb):
        return f"its GPU is {offer.gpu}"
    return ""


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count:,} GPUs"


def _unpriced(offer: Offer) -> str:
    spot = "" if offer.spot_nanos is None else f"; its spot price is {format_nanos(offer.spot_nanos)}"
    if offer.per_gpu_nanos is not None:
        return (
            f"the list has no on-demand price for the machine, and {format_nanos(offer.per_gpu_nanos)} as the price of"
            f" a GPU may be that of the machine{spot}"
        )
    return f"the list has no on-demand price{spot}"


def _price(offer: Offer, wanted: Requirement) -> tuple[str, int] | None:
    """The cheaper price that is allowed: its kind, and nanos an hour of the machine."""
    allowed = [("on demand", offer.on_demand_nanos), ("spot", offer.spot_nanos if wanted.spot else None)]
    known = [(nanos, kind) for kind, nanos in allowed if nanos is not None]
    if not known:
        return None
    nanos, kind = min(known)
    return kind, nanos


def _told(offer: Offer) -> dict[str, Any]:
    return {
        "cloud": offer.cloud, "name": offer.name, "gpu": offer.gpu, "gpus": offer.gpus, "memory_gb": offer.memory_gb,
        "cpus": offer.cpus, "ram": offer.ram, "region": offer.region,
        "start": None if offer.start is None else offer.start.isoformat(), "lines": list(offer.lines),
        "notes": list(offer.notes),
    }  # fmt: skip


def _priced(offer: Offer, wanted: Requirement) -> dict[str, Any]:
    """An offer that will do, with what is paid: whole machines, however many of their GPUs are needed."""
    price = _price(offer, wanted)
    assert price is not None, "an offer without a price was refused"
    kind, nanos = price
    machines = ceil(wanted.count / offer.gpus)
    return {
        **_told(offer), "price": kind, "machine_hour_nanos": nanos, "machines": machines,
        "spare_gpus": machines * offer.gpus - wanted.count, "hour_nanos": machines * nanos,
        "total_nanos": machines * nanos * wanted.hours,
    }  # fmt: skip


# For people


def wanted_text(requirement: Mapping[str, Any]) -> str:
    """A requirement in a line."""
    kind = requirement["gpu"] or "GPUs of any type"
    parts = [f"{requirement['count']:,} x {kind}"]
    if requirement["memory_gb"]:
        parts.append(f"at least {requirement['memory_gb']:g} GB each")
    parts.append("in one machine" if requirement["one_node"] else "in one machine or several")
    parts.append(f"for {requirement['hours']:,} h")
    if requirement["region"]:
        parts.append(f"in {requirement['region']}")
    if requirement["start_by"]:
        parts.append(f"from {requirement['start_by']} at the latest")
    parts.append("spot too" if requirement["spot"] else "on demand")
    return ", ".join(parts)


def _head(row: Mapping[str, Any]) -> str:
    gpus = f"{row['gpus']} x {row['gpu']}"
    return f"{row['cloud'][:17]:<18}{row['name'][:23]:<24}{gpus[:23]:<24}"


def text(answer: Mapping[str, Any]) -> str:
    requirement = answer["requirement"]
    lines = [wanted_text(requirement), answer["note"]]
    if requirement["measured_by"]:
        lines.append(f"measured: {requirement['measured_by']}")
    lines += ["", f"{len(answer['feasible']):,} of {answer['listed']:,} offers meet it"]
    if answer["feasible"]:
        lines.append(
            f"{'':>4} {'cloud':<18}{'machine':<24}{'GPU':<24}{'machine/h':>12}{'machines':>10}{'spare':>7}"
            f"{'all, /h':>12}{'in all':>16}"
        )
    for row in answer["feasible"]:
        lines.append(
            f"{row['rank']:>4} {_head(row)}"
            f"{format_nanos(row['machine_hour_nanos']):>12}{row['machines']:>10,}{row['spare_gpus']:>7,}"
            f"{format_nanos(row['hour_nanos']):>12}{format_nanos(row['total_nanos']):>16}"
            + (" spot" if row["price"] == "spot" else "")
        )
        lines += [f"       {note}" for note in row["notes"]]
    if answer["refused"]:
        lines += ["", "refused"]
        lines += [f"     {_head(row)}{'; '.join(row['reasons'])}" for row in answer["refused"]]
    lines += [f"line {row['line']} was left out: {row['reason']}" for row in answer["refused_lines"]]
    return "\n".join(lines)
