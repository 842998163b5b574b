"""What the shell's two navigation rows offer, as data.

Every entry names a URL; one that does not exist yet, or that the viewer's role may not open, is left out.
Hiding is a courtesy: the view itself checks the role.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from django.urls import NoReverseMatch, reverse

ADMIN, FINANCE, ONCALL, VIEWER, TENANT = "admin", "finance", "oncall", "viewer", "tenant"
STAFF = frozenset({ADMIN, FINANCE, ONCALL, VIEWER})
EVERYONE = STAFF | {TENANT}


@dataclass(frozen=True)
class Entry:
    """One link. `url_names`: the first that resolves without arguments is taken."""

    label: str
    url_names: tuple[str, ...]
    roles: frozenset[str] = STAFF


@dataclass(frozen=True)
class Section:
    """One primary entry and its sub row. `key` is what a page gives as `nav_section`."""

    key: str
    entry: Entry
    sub: tuple[Entry, ...] = field(default=())


@dataclass(frozen=True)
class Link:
    """An entry that resolved, ready for the template."""

    label: str
    url: str
    current: bool
    key: str = ""


def _entry(label: str, *url_names: str, roles: frozenset[str] = STAFF) -> Entry:
    return Entry(label, url_names, roles)


SECTIONS: tuple[Section, ...] = (
    Section(
        "live",
        _entry("Live", "home"),
        (
            _entry("Now", "home"),
            _entry("Alerts", "alerts"),
            _entry("Silences", "silences"),
            _entry("Receivers", "receivers"),
        ),
    ),
    Section("pools", _entry("Pools", "pools"), (_entry("Pools", "pools"), _entry("Agents", "agents"))),
    Section("requests", _entry("Requests", "requests", roles=EVERYONE)),
    Section(
        "policy",
        _entry("Policy", "policy"),
        (
            _entry("Revisions", "policy"),
            _entry("Contracts", "contracts"),
            _entry("Classes", "classes"),
            _entry("Drift", "policy-drift", "drift"),
        ),
    ),
    Section(
        "tenants",
        _entry("Tenants", "tenants", roles=EVERYONE),
        (
            _entry("All tenants", "tenants", roles=EVERYONE),
            _entry("Keys", "api-keys", "keys", roles=EVERYONE),
            _entry("Members and roles", "members", roles=frozenset({ADMIN})),
        ),
    ),
    Section(
        "lab",
        _entry("Lab", "lab"),
        (_entry("Experiments", "lab"), _entry("New", "lab-choose"), _entry("Compare", "lab-compare")),
    ),
    Section(
        "finance",
        _entry("Finance", "finance"),
        (
            _entry("Attribution", "finance"),
            _entry("Invoices", "invoices"),
            _entry("Invoice bridge", "finance-bridge", "bridge"),
            _entry("Statements", "statements", "finance-statements"),
            _entry("Budgets", "budgets", roles=EVERYONE),
            _entry("Rates", "rates"),
            _entry("Periods", "periods", "finance-periods"),
            _entry("Exports", "exports", "finance-exports"),
            _entry("Set aside", "set-aside", roles=frozenset({ADMIN, FINANCE})),
        ),
    ),
    Section("jobs", _entry("Jobs", "jobs", roles=EVERYONE)),
    Section("audit", _entry("Audit", "audit")),
    Section(
        "settings",
        _entry("Settings", "settings"),
        (_entry("Settings", "settings"), _entry("Set up", "setup-guide")),
    ),
)


def resolve(url_names: Iterable[str]) -> str | None:
    """The first of the names that exists and needs no arguments, or None."""
    for name in url_names:
        try:
            return reverse(name)
        except NoReverseMatch:
            continue
    return None


def _links(entries: Iterable[tuple[str, Entry]], *, role: str, path: str, current_key: str | None) -> list[Link]:
    """Visible links in their order; the longest URL that starts the path is the current one."""
    visible = [
        (key, entry.label, url)
        for key, entry in entries
        if role in entry.roles and (url := resolve(entry.url_names)) is not None
    ]
    fitting = [url for _, _, url in visible if path == url or (url != "/" and path.startswith(url))]
    longest = max(fitting, key=len, default=None)
    return [
        Link(label, url, (key == current_key) if current_key else url == longest, key) for key, label, url in visible
    ]


def primary_links(role: str, path: str, *, current_key: str | None = None) -> list[Link]:
    """The primary row for a role. `current_key` (a page's `nav_section`) wins over the path."""
    return _links(((s.key, s.entry) for s in SECTIONS), role=role, path=path, current_key=current_key)


def section_of(role: str, path: str) -> str | None:
    """The key of the section whose own page or sub page the path is under, or None."""
    best: tuple[int, str] | None = None
    for section in SECTIONS:
        for link in _links(
            ((section.key, e) for e in (section.entry, *section.sub)), role=role, path=path, current_key=None
        ):
            if link.current and (best is None or len(link.url) > best[0]):
                best = (len(link.url), section.key)
    return best[1] if best else None


def sub_links(section_key: str | None, role: str, path: str) -> list[Link]:
    """The sub row of a section; empty when the section has fewer than two visible pages."""
    for section in SECTIONS:
        if section.key == section_key:
            links = _links((("", entry) for entry in section.sub), role=role, path=path, current_key=None)
            return links if len(links) > 1 else []
    return []


def shortcuts(role: str) -> dict[str, str]:
    """Targets of the two-key shortcuts: `g` and the letter."""
    letters = {"live": "l", "tenants": "t", "policy": "p", "finance": "f"}
    return {
        letters[s.key]: url
        for s in SECTIONS
        if s.key in letters and role in s.entry.roles and (url := resolve(s.entry.url_names)) is not None
    }
