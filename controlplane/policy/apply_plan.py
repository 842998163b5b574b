"""What a file would change: its sections against the installation's, as steps in the order in which they can be done.

Pure: plain items in, steps and problems out. Running a step is `applying`'s part.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from controlplane.policy.configuration import instant, read_instant
from controlplane.policy.sections import BY_NAME, FORM, SECTIONS, Item, Key, Section, Type
from controlplane.policy.yaml_lines import Lines, Path, Problem, Unreadable


class Mode(StrEnum):
    """What a file wants of a section: nothing, that it holds these items and no other, or that it is empty."""

    UNMANAGED = "unmanaged"
    REPLACE = "replace"
    CLEAR = "clear"


class Verb(StrEnum):
    CREATE = "create"
    EDIT = "edit"
    ADD = "add"
    REMOVE = "remove"
    ARCHIVE = "archive"


@dataclass(frozen=True)
class Step:
    """One thing to do. `values` is what is set; `before` what the changed fields are now. `child` is the name of a slot
    or the instant of a version, card or rate ("" without one). `line` is where the file says so, 0 where nowhere.
    """

    verb: Verb
    section: str
    key: Key
    values: Item = field(default_factory=dict)
    before: Item = field(default_factory=dict)
    child: str = ""
    line: int = 0
    field_lines: Mapping[str, int] = field(default_factory=dict)
    rank: int = 0

    @property
    def subject(self) -> str:
        return f"{BY_NAME[self.section].noun} {' '.join(self.key)}"

    @property
    def sentence(self) -> str:
        """`edit tenant acme: weight 1 -> 2`."""
        head = f"{self.verb} {self.subject}"
        section = BY_NAME[self.section]
        if self.child and section.parts:
            head = f"{self.verb} slot {self.child} of {self.subject}"
        elif self.verb is Verb.ADD:
            head = f"{self.verb} to {self.subject} from {self.child or 'when it is applied'}"
        if self.verb is Verb.EDIT:
            return f"{head}: " + "; ".join(
                f"{name} {_text(self.before.get(name))} -> {_text(value)}" for name, value in self.values.items()
            )
        return head


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they are done; `modes` is what the file says of each section."""

    steps: tuple[Step, ...]
    modes: dict[str, Mode]

    @property
    def empty(self) -> bool:
        return not self.steps

    @property
    def counts(self) -> dict[str, int]:
        return {verb.value: sum(step.verb is verb for step in self.steps) for verb in Verb}


def plan(lines: Lines, present: Mapping[str, list[Item]]) -> Plan:
    """Raises Unreadable with every line that cannot be used."""
    problems: list[Problem] = []
    modes = _modes(lines, problems)
    wanted = {
        section.name: _items(section, lines, problems)
        for section in SECTIONS
        if modes.get(section.name) == Mode.REPLACE
    }
    if problems:
        raise Unreadable(sorted(problems, key=lambda problem: problem.line))
    steps: list[Step] = []
    for section in SECTIONS:
        if modes[section.name] == Mode.REPLACE:
            steps += _replace(section, wanted[section.name], present[section.name], lines, problems)
        elif modes[section.name] == Mode.CLEAR:
            steps += _archives(section, present[section.name], set())
    if problems:
        raise Unreadable(sorted(problems, key=lambda problem: problem.line))
    return Plan(tuple(sorted(steps, key=_order)), modes)


# Nouns in the order in which they need each other; what goes, goes the other way round.
_MAKE_ORDER = {section.name: number for number, section in enumerate(SECTIONS)}
_GO = (Verb.REMOVE, Verb.ARCHIVE)


def _order(step: Step) -> tuple[int, int, int, int]:
    place = _MAKE_ORDER[step.section]
    if step.verb in _GO:
        return 1, -place, 0 if step.verb is Verb.REMOVE else 1, -step.rank
    # What exists is edited after all that is new is there, and slots after their pool.
    return 0, place, 0 if step.verb is Verb.CREATE else 1, step.rank


def _depths(items: Iterable[Item]) -> dict[str, int]:
    """Slug -> how many parents it has among the items; a ring ends the walk, and the action refuses it."""
    parents = {item["slug"]: item.get("parent") for item in items}
    depths = {}
    for slug in parents:
        walked = {slug}
        at = parents[slug]
        while at in parents and at not in walked:
            walked.add(at)
            at = parents[at]
        depths[slug] = len(walked) - 1
    return depths


def _modes(lines: Lines, problems: list[Problem]) -> dict[str, Mode]:
    top = lines.value
    if not isinstance(top, dict) or top.get("flexband") != FORM or not isinstance(top.get("sections"), dict):
        said = f"Begin the file with `flexband: {FORM}` and `sections:`, as an export does."
        raise Unreadable([Problem(1, said)])
    for name in sorted(set(top) - {"flexband", "sections"}):
        problems.append(Problem(lines.line((name,)), f"{name} is not known here."))
    sections = top["sections"]
    for name in sorted(set(sections) - set(BY_NAME)):
        problems.append(Problem(lines.line(("sections", name)), f"There is no section {name}."))
    modes: dict[str, Mode] = {}
    for section in SECTIONS:
        path = ("sections", section.name)
        mode = _mode(section, sections.get(section.name), lines.line(path), problems)
        if mode is not None:
            modes[section.name] = mode
    return modes


def _mode(section: Section, given: Any, line: int, problems: list[Problem]) -> Mode | None:
    modes = ", ".join(Mode)
    if not isinstance(given, dict) or given.get("mode") not in list(Mode):
        problems.append(
            Problem(line, f"Say what happens to {section.name}: `{section.name}: {{mode: ...}}`, one of {modes}.")
        )
        return None
    mode = Mode(given["mode"])
    for name in sorted(set(given) - {"mode", "items"}):
        problems.append(Problem(line, f"{section.name} has no {name}: it has mode and items."))
    items = given.get("items")
    if mode is Mode.REPLACE and not (isinstance(items, list) and items):
        problems.append(Problem(line, f"{section.name} has no items: to have none say `mode: clear`."))
        return None
    if mode is not Mode.REPLACE and items:
        problems.append(Problem(line, f"{section.name} has items, but its mode is {mode}: say `mode: replace`."))
    if mode is Mode.CLEAR and not section.may_clear:
        problems.append(Problem(line, f"{section.name} cannot be cleared: a price that was told is not taken back."))
    return mode


# ---- reading items ----


@dataclass(frozen=True)
class Wanted:
    item: Item
    path: Path


def _items(section: Section, lines: Lines, problems: list[Problem]) -> list[Wanted]:
    found: list[Wanted] = []
    seen: set[Key] = set()
    for number, item in enumerate(lines.value["sections"][section.name]["items"]):
        path: Path = ("sections", section.name, "items", number)
        if not isinstance(item, dict):
            problems.append(Problem(lines.line(path), f"An item of {section.name} is a set of names with values."))
            continue
        before = len(problems)
        problems += _wrong(item, section.types, section.required, path, lines, (section.parts, section.dated))
        problems += _wrong_children(section, item, path, lines)
        key = section.key_of(item)
        if key in seen:
            problems.append(Problem(lines.line(path), f"{section.noun} {' '.join(key)} is in the file twice."))
        seen.add(key)
        if len(problems) == before:
            found.append(Wanted(item, path))
    return found


def _wrong(
    item: Item,
    types: Mapping[str, Type],
    required: Iterable[str],
    path: Path,
    lines: Lines,
    apart: tuple[str, ...] = (),
) -> Iterator[Problem]:
    for name, value in item.items():
        if name in apart:
            continue
        if name not in types:
            yield Problem(lines.line((*path, name)), f"{name} is not known here; known are {', '.join(types)}.")
        elif not types[name].holds(value):
            yield Problem(lines.line((*path, name)), f"{name} has to be {types[name].said}.")
    for name in required:
        if name not in item:
            yield Problem(lines.line(path), f"{name} is missing.")


def _wrong_children(section: Section, item: Item, path: Path, lines: Lines) -> Iterator[Problem]:
    name = section.parts or section.dated
    if not name or name not in item:
        return
    children = item[name]
    if not isinstance(children, list) or (section.dated and not children):
        yield Problem(lines.line((*path, name)), f"{name} is a list of at least one, each beginning with `- `.")
        return
    seen: set[str] = set()
    for number, child in enumerate(children):
        at = (*path, name, number)
        if not isinstance(child, dict):
            yield Problem(lines.line(at), f"Each of {name} is a set of names with values.")
            continue
        yield from _wrong(child, section.child_types or {}, ("name", "band") if section.parts else (), at, lines)
        key = str(child.get("name" if section.parts else "effective_from"))
        if key in seen:
            yield Problem(lines.line(at), f"{key} is in {name} twice.")
        seen.add(key)


# ---- comparing ----


def _replace(
    section: Section, wanted: list[Wanted], present: list[Item], lines: Lines, problems: list[Problem]
) -> Iterator[Step]:
    there = {section.key_of(item): item for item in present}
    depths = _depths(one.item for one in wanted) if section.name == "tenants" else {}
    if len(there) < len(present):
        problems.append(
            Problem(lines.line(("sections", section.name)), f"Two {section.name} have the same name: rename one first.")
        )
        return
    for one in wanted:
        now = there.get(section.key_of(one.item))
        rank = depths.get(one.item.get("slug", ""), 0)
        yield from _create(section, one, lines, rank) if now is None else _edit(section, one, now, lines, problems)
    if section.may_clear:
        yield from _archives(section, present, {section.key_of(one.item) for one in wanted})


def _archives(section: Section, present: list[Item], kept: set[Key]) -> Iterator[Step]:
    depths = _depths(present) if section.name == "tenants" else {}
    for item in present:
        key = section.key_of(item)
        if key in kept:
            continue
        for slot in item[section.parts] if section.parts else ():
            yield Step(Verb.REMOVE, section.name, key, child=slot["name"])
        yield Step(Verb.ARCHIVE, section.name, key, rank=depths.get(item.get("slug", ""), 0))


# Of a class: what may name another new class is set once all of them are there.
_SET_LATER = ("overload", "downgrade_to")


def _create(section: Section, one: Wanted, lines: Lines, rank: int) -> Iterator[Step]:
    own = {name: value for name, value in one.item.items() if name in section.types}
    key, at = section.key_of(one.item), lines.line(one.path)
    children = section.parts or section.dated
    if section.dated:
        ordered = sorted(enumerate(one.item[children]), key=lambda pair: pair[1].get("effective_from") or "~")
        for place, (number, child) in enumerate(ordered):
            verb = Verb.CREATE if not place else Verb.ADD
            path = (*one.path, children, number)
            values = {**(own if verb is Verb.CREATE else {}), **_without_instant(child)}
            yield _step(verb, section, key, values, path, lines, child=_starts(child))
        return
    later = {}
    if section.name == "classes" and own.get("downgrade_to") is not None:
        later = {name: own.pop(name) for name in _SET_LATER if name in own}
    yield Step(Verb.CREATE, section.name, key, own, line=at, field_lines=_field_lines(own, one.path, lines), rank=rank)
    if later:
        yield _step(Verb.EDIT, section, key, later, one.path, lines)
    for number, child in enumerate(one.item.get(children, ()) if children else ()):
        yield _step(Verb.ADD, section, key, child, (*one.path, children, number), lines, child=child["name"])


def _edit(section: Section, one: Wanted, now: Item, lines: Lines, problems: list[Problem]) -> Iterator[Step]:
    key = section.key_of(one.item)
    differ = {
        name: value for name, value in one.item.items() if name in section.types and not same(now.get(name), value)
    }
    for name in section.fixed:
        if name in differ:
            said = f"{name} of a {section.noun} is never changed: it is {_text(now.get(name))}. Make another one."
            problems.append(Problem(lines.line((*one.path, name)), said))
    if differ:
        yield _step(Verb.EDIT, section, key, differ, one.path, lines, before={name: now.get(name) for name in differ})
    if section.dated:
        yield from _dated(section, one, now, lines, problems)
    elif section.parts and section.parts in one.item:
        yield from _parts(section, one, now, lines)


def _parts(section: Section, one: Wanted, now: Item, lines: Lines) -> Iterator[Step]:
    key, name = section.key_of(one.item), section.parts
    there = {child["name"]: child for child in now[name]}
    wanted = {child["name"] for child in one.item[name]}
    for number, child in enumerate(one.item[name]):
        path = (*one.path, name, number)
        known = there.get(child["name"])
        if known is None:
            yield _step(Verb.ADD, section, key, child, path, lines, child=child["name"])
            continue
        differ = {field: value for field, value in child.items() if not same(known.get(field), value)}
        if differ:
            before = {field: known.get(field) for field in differ}
            yield _step(Verb.EDIT, section, key, differ, path, lines, before=before, child=child["name"])
    for child_name in sorted(there.keys() - wanted):
        yield Step(Verb.REMOVE, section.name, key, child=child_name, line=lines.line(one.path))


def _dated(section: Section, one: Wanted, now: Item, lines: Lines, problems: list[Problem]) -> Iterator[Step]:
    """Adds what begins later than everything that is there; what is there stays as it is, and has to."""
    key, name = section.key_of(one.item), section.dated
    there = {child["effective_from"]: child for child in now[name]}
    newest = max(there, key=read_instant)
    for number, child in enumerate(one.item[name]):
        path = (*one.path, name, number)
        starts = _starts(child)
        known = there.get(starts) if starts else there[newest]
        values = _without_instant(child)
        differ = known is None or any(not same(known.get(field), value) for field, value in values.items())
        if known is not None and starts and differ:
            said = f"What begins at {starts} is never changed. Add one that begins later, or without effective_from."
            problems.append(Problem(lines.line(path), said))
        elif differ and starts and read_instant(starts) <= read_instant(newest):
            said = f"The newest begins at {newest}: choose a later instant, or leave effective_from out."
            problems.append(Problem(lines.line(path), said))
        elif differ:
            yield _step(Verb.ADD, section, key, values, path, lines, child=starts)


def _starts(child: Item) -> str:
    """The instant as an export writes it; "" for when it is applied."""
    given = child.get("effective_from")
    return instant(read_instant(given)) if given else ""


def _without_instant(child: Item) -> Item:
    return {name: value for name, value in child.items() if name != "effective_from"}


def same(now: Any, wanted: Any) -> bool:
    """Whether a file's value is the present one; whole numbers are the same as floats of their size."""
    if isinstance(now, bool) or isinstance(wanted, bool):
        return now is wanted
    return bool(now == wanted)


def _step(
    verb: Verb,
    section: Section,
    key: Key,
    values: Item,
    path: Path,
    lines: Lines,
    *,
    before: Item | None = None,
    child: str = "",
) -> Step:
    return Step(
        verb, section.name, key, values, before or {}, child, lines.line(path), _field_lines(values, path, lines)
    )


def _field_lines(values: Iterable[str], path: Path, lines: Lines) -> dict[str, int]:
    return {name: lines.line((*path, name)) for name in values}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, str):
        return repr(value) if not value or value != value.strip() else value
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
