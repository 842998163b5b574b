"""Price lists of GPU machines as CSV, read row by row: bad rows are named by number, good ones kept.

The columns are those of public price catalogues: `Cloud` (or `Vendor`), `GPU Type`, `GPUs`, `GPU RAM`, `vCPUs`, `RAM`,
`On-demand` (or `Per-Hour`), `Per-GPU`, `Spot`, `Name`, and where a list has them `Region` and `Available from`.

Rows are odd in known ways, and each is told beside the offer. `On-demand` and `Spot` are prices of the whole machine an
hour; where `Per-GPU` is not that price divided by the GPUs, the machine's price is what is paid. Without `On-demand`
the machine has no price of that kind, whatever `Per-GPU` says: some lists put the machine's price there. `GPU RAM` is
that of all GPUs or of one; the memory in the type's name, as in `A100 (80 GB)`, is that of one. A row may offer a
machine in several shapes: several numbers of GPUs are several offers, a range of CPUs or memory is told.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Final

from controlplane.core.money import NANOS_PER_CENT, format_nanos, parse_nanos
from controlplane.lab.traces import BadLine, TraceError

BYTES_MAX: Final = 4 << 20
ROWS_MAX: Final = 20_000
GPUS_MAX: Final = 1_024
MEMORY_MAX_GB: Final = 10_000
TEXT_CHARS_MAX: Final = 120
_COLUMNS: Final = {
    "cloud": ("cloud", "vendor", "provider"),
    "type": ("gpu type", "gpu"),
    "gpus": ("gpus", "gpu count"),
    "memory": ("gpu ram", "gpu memory"),
    "cpus": ("vcpus",),
    "ram": ("ram",),
    "on_demand": ("on-demand", "per-hour", "on demand"),
    "per_gpu": ("per-gpu",),
    "spot": ("spot",),
    "name": ("name", "instance"),
    "region": ("region",),
    "start": ("available from", "start"),
}
_NEEDED: Final = ("cloud", "type", "gpus", "on_demand")
_IN_NAME: Final = re.compile(r"\((\d+(?:\.\d+)?)\s*GB\)", re.IGNORECASE)
_MAKERS: Final = frozenset({"nvidia", "amd", "intel"})
UNPRICED: Final = frozenset({"", "-", "–", "n/a", "na", "none"})


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine for hire in one shape. Prices are nanos an hour of the whole machine; None is not in the list.

    `lines` are the rows that offer it; `words` what its type is called, in small letters and without memory and maker.
    """

    cloud: str
    name: str
    gpu: str
    words: frozenset[str]
    gpus: int
    memory_gb: float | None
    on_demand_nanos: int | None
    spot_nanos: int | None
    per_gpu_nanos: int | None
    cpus: str = ""
    ram: str = ""
    region: str = ""
    start: date | None = None
    lines: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def identity(self) -> tuple[object, ...]:
        """Rows that are equal in this are one offer."""
        return (
            self.cloud, self.name, self.gpu, self.gpus, self.memory_gb, self.on_demand_nanos, self.spot_nanos,
            self.per_gpu_nanos, self.cpus, self.ram, self.region, self.start,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OfferList:
    """What a list holds, in its order."""

    offers: tuple[Offer, ...]
    refused: tuple[BadLine, ...] = ()


def words_of(gpu: str) -> tuple[frozenset[str], float | None]:
    """What a GPU is called and the memory that its name has: `Nvidia RTX A6000 (48 GB)` is {rtx, a6000} and 48."""
    memory = _IN_NAME.search(gpu)
    plain = _IN_NAME.sub(" ", gpu).lower().replace("-", " ").split()
    return frozenset(plain) - _MAKERS, None if memory is None else float(memory[1])


def read_offers(content: bytes) -> OfferList:
    """Raises TraceError for what is no such list, or has no usable row."""
    if len(content) > BYTES_MAX:
        raise TraceError(f"a list of offers has at most {BYTES_MAX >> 20} MB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"the list is not UTF-8 text (byte {error.start})") from None
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = _columns_of(reader.fieldnames or ())
    found: dict[tuple[object, ...], Offer] = {}
    refused: list[BadLine] = []
    try:
        for number, row in enumerate(reader, start=1):
            if number > ROWS_MAX:
                raise TraceError(f"a list of offers has at most {ROWS_MAX:,} rows")
            line = reader.line_num
            try:
                offers = _offers_of({key: (row.get(column) or "").strip() for key, column in columns.items()}, line)
            except ValueError as error:
                refused.append(BadLine(line, str(error)))
                continue
            for offer in offers:
                known = found.get(offer.identity)
                found[offer.identity] = offer if known is None else _again(known, line)
    except csv.Error as error:
        raise TraceError(f"line {reader.line_num} is no CSV: {error}") from None
    if not found:
        why = f"; line {refused[0].line}: {refused[0].reason}" if refused else ""
        raise TraceError(f"the list has no usable row{why}")
    return OfferList(tuple(found.values()), tuple(refused))


def _columns_of(names: object) -> dict[str, str]:
    """Our name of a column -> the list's. Raises TraceError where one that is needed is not there."""
    given = {str(name).strip().lower(): str(name) for name in (names if isinstance(names, (list, tuple)) else ())}
    found = {}
    for key, known in _COLUMNS.items():
        for name in known:
            if name in given:
                found[key] = given[name]
                break
    if lacking := [_COLUMNS[key][0] for key in _NEEDED if key not in found]:
        raise TraceError(f"the first line names no column {', '.join(lacking)}: this is no list of GPU offers")
    return found


def _again(known: Offer, line: int) -> Offer:
    lines = (*known.lines, line)
    notes = tuple(note for note in known.notes if not note.startswith("listed "))
    return replace(known, lines=lines, notes=(*notes, f"listed {len(lines)} times, alike"))


def _offers_of(row: Mapping[str, str], line: int) -> list[Offer]:
    """A row's shapes. Raises ValueError that says what is wrong with it."""
    cloud, gpu = _text(row["cloud"], "cloud"), _text(row["type"], "GPU type")
    words, in_name = words_of(gpu)
    if not words:
        raise ValueError(f"{gpu!r} names no GPU")
    counts = _counts(row["gpus"])
    prices = {key: _price(row.get(key, ""), key) for key in ("on_demand", "per_gpu", "spot")}
    said_gb = _memory(row.get("memory", ""))
    start = row.get("start", "")
    offers = []
    for count in counts:
        notes: list[str] = []
        on_demand, spot = prices["on_demand"], prices["spot"]
        if len(counts) > 1:
            notes.append(f"one of {len(counts)} shapes of its row")
            # One price cannot be that of all shapes: only the price of a GPU can.
            on_demand = None if prices["per_gpu"] is None else prices["per_gpu"] * count
            spot = None
        memory_gb = _memory_of_one(in_name, said_gb, count, notes)
        _note_ranges(row, notes)
        _note_prices(on_demand, prices["per_gpu"], count, notes)
        offers.append(
            Offer(
                cloud=cloud,
                name=_cut(row, "name"),
                gpu=gpu,
                words=words,
                gpus=count,
                memory_gb=memory_gb,
                on_demand_nanos=on_demand,
                spot_nanos=spot,
                per_gpu_nanos=prices["per_gpu"],
                cpus=_cut(row, "cpus"),
                ram=_cut(row, "ram"),
                region=_cut(row, "region"),
                start=_day(start) if start else None,
                lines=(line,),
                notes=tuple(notes),
            )
        )
    return offers


def _cut(row: Mapping[str, str], key: str) -> str:
    return row.get(key, "")[:TEXT_CHARS_MAX]


def _text(text: str, what: str) -> str:
    if not text or len(text) > TEXT_CHARS_MAX or not text.isprintable():
        raise ValueError(f"the {what} is text of 1 to {TEXT_CHARS_MAX} printable characters")
    return text


def _counts(text: str) -> list[int]:
    """`8`, or several shapes as `1, 2, 4` or `1/2/4`."""
    try:
        counts = [int(part) for part in re.split(r"\s*[,/;|]\s*", text)]
    except ValueError:
        raise ValueError(f"{text!r} is no number of GPUs") from None
    if not all(1 <= count <= GPUS_MAX for count in counts):
        raise ValueError(f"a machine has 1 to {GPUS_MAX} GPUs, not {text}")
    return sorted(set(counts))


def _price(text: str, key: str) -> int | None:
    """Nanos an hour; None where the list has none. A price of 0 is none that anybody is offered."""
    plain = text.lower().removeprefix("usd").strip().removeprefix("$").strip()
    if plain in UNPRICED:
        return None
    try:
        nanos = parse_nanos(plain)
    except ValueError as error:
        raise ValueError(f"{_COLUMNS[key][0]}: {error}") from None
    if nanos <= 0:
        raise ValueError(f"{_COLUMNS[key][0]}: {text!r} is no price")
    return nanos


def _memory(text: str) -> float | None:
    plain = text.lower().removesuffix("gb").strip()
    if plain in UNPRICED:
        return None
    try:
        found = float(plain)
    except ValueError:
        raise ValueError(f"{text!r} is no memory of GPUs in GB") from None
    if not 0 < found <= MEMORY_MAX_GB:
        raise ValueError(f"{text!r} is no memory of GPUs in GB")
    return found


def _memory_of_one(in_name: float | None, said_gb: float | None, gpus: int, notes: list[str]) -> float | None:
    """Memory of one GPU: by the type's name, else all of it by the number of GPUs."""
    if in_name is None:
        return None if said_gb is None else said_gb / gpus
    if said_gb is not None and said_gb != in_name * gpus:
        notes.append(f"lists {said_gb:g} GB for {gpus} GPUs of {in_name:g} GB")
    return in_name


def _note_ranges(row: Mapping[str, str], notes: list[str]) -> None:
    units = (("cpus", "vCPUs"), ("ram", "GB"))
    told = [f"{row[key]} {unit}" for key, unit in units if "-" in row.get(key, "").strip("-")]
    if told:
        notes.append(f"several shapes under one price: {', '.join(told)}")


def _note_prices(on_demand: int | None, per_gpu: int | None, gpus: int, notes: list[str]) -> None:
    """Where the price of one GPU is not the machine's divided by its GPUs, to the cent."""
    if on_demand is not None and per_gpu is not None and abs(on_demand - per_gpu * gpus) > gpus * NANOS_PER_CENT:
        notes.append(
            f"lists {format_nanos(per_gpu)} for a GPU,"
            f" the machine's price is {format_nanos(on_demand // gpus)} for each"
        )


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        raise ValueError(f"{text!r} is no date such as 2026-12-01") from None
