"""A compiled configuration: one document per pool, not yet stamped with a revision, and its JSON form."""

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec

from controlplane.wire.policy import SCHEMA, PolicyDocument, SlotPolicy
from controlplane.wire.signing import canonical, digest_hex


class _Stored(msgspec.Struct):
    pools: dict[str, PolicyDocument]


_sorted = msgspec.json.Encoder(order="sorted")
_stored = msgspec.json.Decoder(_Stored)


@dataclass(frozen=True)
class Stamp:
    """What a push adds to every document: the number and the instants between which it may be applied first."""

    revision: int
    not_before: datetime
    accept_until: datetime


@dataclass(frozen=True)
class Configuration:
    """All policy as documents by pool slug. Two of them are equal when their digests are."""

    pools: dict[str, PolicyDocument]

    def to_json(self) -> dict[str, Any]:
        """The form that a revision keeps."""
        return {"schema": SCHEMA, "pools": {slug: msgspec.to_builtins(doc) for slug, doc in sorted(self.pools.items())}}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Configuration":
        """Raises msgspec.ValidationError when a revision was written by a newer schema."""
        return cls({slug: msgspec.convert(doc, PolicyDocument) for slug, doc in raw["pools"].items()})

    @classmethod
    def from_text(cls, text: str) -> "Configuration":
        """The same from the text of the form, without the dicts between."""
        return cls(_stored.decode(text).pools)

    @cached_property
    def digest(self) -> str:
        """Of the canonical form of `to_json`, written from the documents: of ten thousand tenants that is a quarter."""
        return digest_hex(_sorted.encode({"schema": SCHEMA, "pools": self.pools}))

    def stamped(self, stamp: Stamp) -> dict[str, bytes]:
        """Pool slug -> canonical bytes of its document under that revision."""
        return {slug: canonical(_stamp(document, stamp)) for slug, document in sorted(self.pools.items())}

    def with_bindings(self, agent_of_slot: dict[int, int | None]) -> "Configuration":
        """The same policy with slots on the agents that run them now: a binding is a fact, not a rule."""
        return Configuration({slug: _bind(document, agent_of_slot) for slug, document in self.pools.items()})


def instant(at: datetime) -> str:
    """An instant as documents carry it: UTC, RFC 3339, `Z`."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def read_instant(text: str) -> datetime:
    """Raises ValueError on text that `instant` did not write."""
    return datetime.fromisoformat(text)


def _stamp(document: PolicyDocument, stamp: Stamp) -> PolicyDocument:
    return msgspec.structs.replace(
        document,
        revision=stamp.revision,
        not_before=instant(stamp.not_before),
        accept_until=instant(stamp.accept_until),
    )


def _bind(document: PolicyDocument, agent_of_slot: dict[int, int | None]) -> PolicyDocument:
    slots: list[SlotPolicy] = [
        msgspec.structs.replace(slot, agent_id=agent_of_slot.get(slot.id)) for slot in document.pool.slots
    ]
    return msgspec.structs.replace(document, pool=msgspec.structs.replace(document.pool, slots=slots))
