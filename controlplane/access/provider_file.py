"""OpenID providers, from one file that `FLEXBAND_OIDC_PROVIDERS` names. Secrets stand in files of their own.

- id: work
  name: Work account
  issuer: https://login.example.com
  client_id: flexband
  client_secret_file: /run/secrets/oidc-work
  new_members: viewer        # optional: what an unknown person becomes; left out, nobody
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
NEEDED = ("id", "name", "issuer", "client_id", "client_secret_file")
OPTIONAL = ("new_members",)
# An administrator or a tenant's member is always named by somebody.
ROLES_FOR_NEW = ("finance", "oncall", "viewer")


class BadProviders(ValueError):
    """The file cannot be used; the message says which entry and why."""


@dataclass(frozen=True)
class OpenIdProvider:
    """`issuer` is the address whose `/.well-known/openid-configuration` describes the provider."""

    id: str
    name: str
    issuer: str
    client_id: str
    client_secret: str
    new_members: str = ""


def read_providers(path: str) -> tuple[OpenIdProvider, ...]:
    """The providers of a file; none for an empty path. Raises BadProviders, and OSError for a missing file."""
    if not path:
        return ()
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise BadProviders(f"{path} is not YAML: {error}") from error
    if not isinstance(entries, list):
        raise BadProviders(f"{path} must be a list of providers.")
    providers = tuple(_provider(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1))
    _once((one.id for one in providers), path)
    return providers


def _provider(entry: Any, where: str) -> OpenIdProvider:
    if not isinstance(entry, dict):
        raise BadProviders(f"{where}: write names and values.")
    if missing := [name for name in NEEDED if not isinstance(entry.get(name), str) or not entry[name].strip()]:
        raise BadProviders(f"{where}: give {', '.join(missing)}.")
    if unknown := sorted(set(map(str, entry)) - {*NEEDED, *OPTIONAL}):
        raise BadProviders(f"{where}: there is no {', '.join(unknown)}.")
    role = entry.get("new_members", "")
    if role and role not in ROLES_FOR_NEW:
        raise BadProviders(f"{where}: new_members is one of {', '.join(ROLES_FOR_NEW)}, or left out.")
    if not ID.fullmatch(entry["id"]):
        raise BadProviders(f"{where}: the id has lower-case letters, digits and hyphens.")
    if not entry["issuer"].startswith(("https://", "http://")):
        raise BadProviders(f"{where}: the issuer is an address that begins with https://.")
    secret = Path(entry["client_secret_file"]).read_text(encoding="utf-8").strip()
    return OpenIdProvider(
        entry["id"], entry["name"].strip(), entry["issuer"].rstrip("/"), entry["client_id"], secret, role
    )


def _once(ids: Iterable[str], path: str) -> None:
    seen: set[str] = set()
    for one in ids:
        if one in seen:
            raise BadProviders(f"{path}: the id {one} stands there twice.")
        seen.add(one)
