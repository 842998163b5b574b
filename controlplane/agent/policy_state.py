"""The policy and the live list in force: verified, applied whole or not at all, and kept over restarts."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from controlplane.agent.atomic_file import write_atomic
from controlplane.agent.identity import signing_key
from controlplane.wire import signing
from controlplane.wire.policy import (
    SCHEMA,
    LiveBody,
    LiveClass,
    LiveFreeze,
    LiveKey,
    LiveTenant,
    PolicyDocument,
    SignedPolicy,
    document_message,
    live_message,
)
from controlplane.wire.report import LiveDelta, LiveItem

POLICY_FILE = "policy.json"
LIVE_FILE = "live.json"
NOT_YET = "not valid before"


@dataclass(frozen=True)
class Trust:
    """What an agent accepts documents by; refreshed by each hello."""

    installation: str
    pool: str
    signing_keys: dict[str, str]


class StoredPolicy(msgspec.Struct, frozen=True):
    digest: str
    bundle: bytes


class StoredLive(msgspec.Struct, frozen=True):
    number: int
    items: list[LiveItem]


def instant_us(text: str) -> int:
    """Unix microseconds of an ISO 8601 instant with a zone. Raises ValueError without one."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    return round(moment.timestamp() * 1_000_000)


def refusal_of(document: PolicyDocument, trust: Trust, *, revision_now: int, now_us: int) -> str | None:
    """Why a genuine document is not applied, or None. `revision_now` 0 is no policy yet."""
    if document.schema != SCHEMA:
        return f"schema {document.schema} is not known here (this agent knows {SCHEMA}): upgrade the agent"
    if document.installation != trust.installation:
        return f"the policy is for installation {document.installation}, this agent belongs to {trust.installation}"
    if document.pool.slug != trust.pool:
        return f"the policy is for pool {document.pool.slug}, this agent belongs to {trust.pool}"
    if document.revision <= revision_now:
        return f"revision {document.revision} does not grow: {revision_now} is in force"
    try:
        not_before_us, accept_until_us = instant_us(document.not_before), instant_us(document.accept_until)
    except ValueError as error:
        return f"the policy's instants cannot be read: {error}"
    if now_us < not_before_us:
        return f"{NOT_YET} {document.not_before}: this agent's clock may be behind"
    if now_us >= accept_until_us:
        return f"had to be applied before {document.accept_until}: push the policy again"
    return None


def content_refusal(document: PolicyDocument) -> str | None:
    """Why a document contradicts itself, or None: references that lead nowhere are found before anything changes."""
    classes = {entry.slug for entry in document.classes}
    missing = sorted({entry.downgrade_to for entry in document.classes if entry.downgrade_to is not None} - classes)
    if missing:
        return f"the policy names classes that it does not hold: {', '.join(missing)}"
    if len({slot.name for slot in document.pool.slots}) != len(document.pool.slots):
        return "two slots of the policy have the same name"
    if sum(entry.min_share_ppm for entry in document.classes) > 1_000_000:
        return "the classes' minimum shares add up to more than 1"
    if any(tenant.weight < 1 for tenant in document.tenants):
        return "a tenant's weight is below 1"
    return None


@dataclass(frozen=True)
class Verified:
    """A bundle that may be applied, or why not. `revision` is that of the refused document where it could be read."""

    document: PolicyDocument | None
    reason: str = ""
    revision: int = 0
    unknown_kid: str = ""


def verify_bundle(bundle: bytes, digest: str, trust: Trust) -> Verified:
    """Check envelope, digest and signature; says nothing yet about revision and instants."""
    try:
        envelope = msgspec.json.decode(bundle, type=SignedPolicy)
        body = signing.from_text(envelope.body)
    except ValueError as error:
        return Verified(None, f"the bundle cannot be read: {error}")
    if signing.digest_hex(body) != digest:
        return Verified(None, "the bundle is not the one that was announced: its digest differs")
    try:
        document = msgspec.json.decode(body, type=PolicyDocument)
    except msgspec.DecodeError as error:
        return Verified(None, f"the policy document cannot be read: {error}")
    public = signing_key(trust.signing_keys, "policy", envelope.kid)
    if public is None:
        reason = f"signed with a key that is not known here ({envelope.kid})"
        return Verified(None, reason, document.revision, envelope.kid)
    message = document_message(document, digest)
    try:
        genuine = signing.verify(public, signing.from_text(envelope.signature), message)
    except ValueError:
        genuine = False
    if not genuine:
        return Verified(None, "the policy's signature does not hold", document.revision)
    return Verified(document, revision=document.revision)


class PolicyState:
    """The last good policy; a refused one leaves it in force."""

    def __init__(self, state_dir: Path, trial: Callable[[PolicyDocument], str | None]) -> None:
        """`trial` rehearses a document and gives the reason why it cannot be applied, or None."""
        self._path = state_dir / POLICY_FILE
        self._trial = trial
        self.document: PolicyDocument | None = None
        self.digest = ""
        self.refused_revision: int | None = None
        self.refused_digest = ""
        self.refused_reason = ""
        self.unknown_kid = ""
        """The key of the bundle considered last, where it is not known here: a hello may bring it."""

    @property
    def revision(self) -> int:
        return 0 if self.document is None else self.document.revision

    def restore(self, trust: Trust) -> PolicyDocument | None:
        """The policy of the process before; None when there is none or it does not verify any more.

        `accept_until` limits first application, never use.
        """
        try:
            stored = msgspec.msgpack.decode(self._path.read_bytes(), type=StoredPolicy)
        except (OSError, msgspec.DecodeError):
            return None
        verified = verify_bundle(stored.bundle, stored.digest, trust)
        document = verified.document
        if document is None or document.installation != trust.installation or document.pool.slug != trust.pool:
            return None
        if document.schema != SCHEMA or self._why_not(document) is not None:
            return None
        self.document, self.digest = document, stored.digest
        return document

    def consider(self, bundle: bytes, digest: str, trust: Trust, *, now_us: int) -> PolicyDocument | None:
        """Verify a pulled bundle and take it, or keep the present one and remember why (the NACK)."""
        verified = verify_bundle(bundle, digest, trust)
        document, reason = verified.document, verified.reason
        self.unknown_kid = verified.unknown_kid
        if document is not None:
            refusal = refusal_of(document, trust, revision_now=self.revision, now_us=now_us) or self._why_not(document)
            document, reason = (None, refusal) if refusal is not None else (document, "")
        if document is None:
            self.refuse(verified.revision, digest, reason)
            if reason.startswith(NOT_YET):
                # Its time may come: asked for again with the next answer that names it.
                self.refused_digest = ""
            return None
        write_atomic(self._path, msgspec.msgpack.encode(StoredPolicy(digest, bundle)))
        self.document, self.digest = document, digest
        self.forget_refusal()
        return document

    def _why_not(self, document: PolicyDocument) -> str | None:
        return content_refusal(document) or self._trial(document)

    def refuse(self, revision: int, digest: str, reason: str) -> None:
        """Remember why a revision was not applied; told with every report until another is applied."""
        self.refused_revision, self.refused_digest, self.refused_reason = revision, digest, reason

    def forget_refusal(self) -> None:
        """Nothing is refused any more: what was may be pulled again."""
        self.refused_revision, self.refused_digest, self.refused_reason = None, "", ""

    def wants(self, revision: int, digest: str) -> bool:
        """Whether the desired revision is worth pulling: newer than what is applied, and not refused for good."""
        return bool(digest) and revision > self.revision and digest != self.refused_digest


class LiveList:
    """Keys, suspended tenants and classes, freezes: each entry signed, applied in order of its number."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / LIVE_FILE
        self.number = 0
        self.whole = False
        """Nothing is missing: the control plane said so, or the process before had a list. A long one comes in parts,
        and until the last of them a key that is not here may be a good one."""
        self.keys: dict[int, LiveKey] = {}
        self.by_hash: dict[str, LiveKey] = {}
        self.tenants: dict[int, LiveTenant] = {}
        self.classes: dict[int, LiveClass] = {}
        self.freezes: dict[int, LiveFreeze] = {}
        self._items: dict[tuple[str, int], LiveItem] = {}
        self.problem = ""
        self.unknown_kid = ""
        """The key of the entry that stopped the last delta, where it is not known here: a hello may bring it."""

    def restore(self, trust: Trust) -> None:
        """Entries of the process before, verified again."""
        try:
            stored = msgspec.msgpack.decode(self._path.read_bytes(), type=StoredLive)
        except (OSError, msgspec.DecodeError):
            return
        bodies = self._verified_all(stored.items, trust)
        if bodies is not None:
            self._place_all(bodies)
            self.number = stored.number
            self.whole = True

    def apply(self, delta: LiveDelta | None, trust: Trust) -> bool:
        """Take a delta of an answer, or that nothing is missing; True when something changed.

        A delta that starts past what is here is left: the number in the next report asks for the rest. An entry that
        does not verify stops the whole delta, so that the number never claims what is not in force.
        """
        self.unknown_kid = ""
        if delta is None:
            was_whole, self.whole = self.whole, True
            return not was_whole
        if not delta.full and (delta.since > self.number or delta.through <= self.number):
            return False
        if delta.full and delta.through == self.number and not delta.entries:
            return False
        bodies = self._verified_all(delta.entries, trust)
        if bodies is None:
            return False
        if delta.full:
            self._clear()
        self._place_all(bodies)
        self.number = delta.through
        self.problem = ""
        stored = StoredLive(self.number, list(self._items.values()))
        write_atomic(self._path, msgspec.msgpack.encode(stored))
        return True

    def hasten(self, items: list[LiveItem], trust: Trust) -> bool:
        """Put entries of a nudge in force; True when something changed.

        The number stays: the next report brings them again with all before them, so that no nudge can hide an entry.
        """
        bodies = self._verified_all(items, trust)
        return bodies is not None and self._place_all([found for found in bodies if found[1].number > self.number])

    def _clear(self) -> None:
        for table in (self.keys, self.by_hash, self.tenants, self.classes, self.freezes, self._items):
            table.clear()

    def _verified_all(self, items: list[LiveItem], trust: Trust) -> list[tuple[LiveBody, LiveItem]] | None:
        """In order of their numbers; None as soon as one does not verify."""
        bodies: list[tuple[LiveBody, LiveItem]] = []
        self.unknown_kid = ""
        for item in sorted(items, key=lambda item: item.number):
            body = self._verified(item, trust)
            if body is None:
                return None
            bodies.append((body, item))
        return bodies

    def _place_all(self, bodies: list[tuple[LiveBody, LiveItem]]) -> bool:
        """Whether one was newer than what is here of its subject: an answer may be older than a nudge."""
        newer = [(body, item) for body, item in bodies if item.number > self._held(body)]
        for body, item in newer:
            self._place(body, item)
        return bool(newer)

    def _held(self, body: LiveBody) -> int:
        item = self._items.get(_subject(body))
        return 0 if item is None else item.number

    def _verified(self, item: LiveItem, trust: Trust) -> LiveBody | None:
        try:
            raw, signature = signing.from_text(item.body), signing.from_text(item.signature)
            body: LiveBody = msgspec.json.decode(raw, type=LiveBody)
        except ValueError as error:
            self.problem = f"live entry {item.number} cannot be read: {error}"
            return None
        public = signing_key(trust.signing_keys, "live", item.kid)
        if public is None:
            self.unknown_kid = item.kid
            self.problem = f"live entry {item.number} is signed with a key that is not known here ({item.kid})"
            return None
        message = live_message(installation=trust.installation, number=item.number, digest=signing.digest_hex(raw))
        if not signing.verify(public, signature, message):
            self.problem = f"the signature of live entry {item.number} does not hold (key {item.kid})"
            return None
        if body.number != item.number:
            self.problem = f"live entry {item.number} says that it is number {body.number}"
            return None
        return body

    def _place(self, body: LiveBody, item: LiveItem) -> None:
        self._items[_subject(body)] = item
        if isinstance(body, LiveKey):
            before = self.keys.get(body.id)
            for digest in before.hashes if before is not None else ():
                self.by_hash.pop(digest, None)
            self.keys[body.id] = body
            for digest in body.hashes:
                self.by_hash[digest] = body
        elif isinstance(body, LiveTenant):
            self.tenants[body.id] = body
        elif isinstance(body, LiveClass):
            self.classes[body.id] = body
        else:
            self.freezes[body.pool_id] = body


def _subject(body: LiveBody) -> tuple[str, int]:
    """The kind and id of what an entry is about."""
    if isinstance(body, LiveKey):
        return "key", body.id
    if isinstance(body, LiveTenant):
        return "tenant", body.id
    return ("class", body.id) if isinstance(body, LiveClass) else ("freeze", body.pool_id)
