"""What may be done to API keys. A secret leaves this module once, in the answer to the call that made it."""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils.crypto import salted_hmac

from controlplane.audit.actions import changes as changed_fields
from controlplane.audit.actions import record
from controlplane.audit.actors import Actor
from controlplane.audit.reasons import checked_reason
from controlplane.tenants.actions import Stale, next_live_number, only
from controlplane.tenants.models import ApiKey, Tenant
from controlplane.wakeups.bells import ring

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
OVERLAP_MAX = timedelta(days=30)
REPEAT_WITHIN = timedelta(minutes=15)
EDITABLE = (
    "name",
    "expires_at",
    "classes",
    "default_class",
    "max_concurrency",
    "requests_per_s",
    "tokens_per_minute",
)


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A key and its secret; `secret` is None when it cannot be shown again."""

    key: ApiKey
    secret: str | None


def create_key(
    *,
    tenant_id: int,
    name: str,
    classes: list[str],
    default_class: str,
    actor: Actor,
    now: datetime,
    reason: str = "",
    **limits: Any,
) -> IssuedKey:
    """A new key of a tenant. `limits`: expires_at, max_concurrency, requests_per_s, tokens_per_minute."""
    only(limits, EDITABLE)
    prefix = _random(8)
    secret = f"fb_{prefix}_{secrets.token_urlsafe(32)}"
    with transaction.atomic():
        tenant = Tenant.objects.select_for_update().get(pk=tenant_id)
        if tenant.state == Tenant.State.ARCHIVED:
            raise ValidationError("An archived tenant gets no keys.")
        key = ApiKey(
            public_id=f"key_{_random(12)}",
            tenant=tenant,
            name=name.strip(),
            prefix=prefix,
            secret_hash=secret_hash(secret),
            classes=list(classes),
            default_class=default_class,
            created_at=now,
            live_number=next_live_number(),
            **limits,
        )
        _check(key, tenant, now)
        key.save(force_insert=True)
        _record(key, tenant, "key.create", actor, now, reason, after={"prefix": prefix, **snapshot(key)})
        ring("policy.sign_live")
    return IssuedKey(key, secret)


def edit_key(
    *, key_id: int, version: int, changes: Mapping[str, Any], actor: Actor, now: datetime, reason: str = ""
) -> ApiKey:
    """Changes fields of EDITABLE; what was spent stays. Raises Stale and ValidationError."""
    only(changes, EDITABLE)
    with transaction.atomic():
        key, tenant = _locked(key_id, version)
        if key.state == ApiKey.State.REVOKED:
            raise ValidationError("A revoked key cannot be changed: create a new one.")
        before = snapshot(key)
        for field, value in changes.items():
            setattr(key, field, value)
        _check(key, tenant, now)
        old, new = changed_fields(before, snapshot(key))
        if not new:
            return key
        key.version += 1
        key.live_number = next_live_number()
        key.save(update_fields=[*changes, "version", "live_number"])
        _record(key, tenant, "key.edit", actor, now, reason, before=old, after=new)
        ring("policy.sign_live")
    return key


def revoke_key(*, key_id: int, reason: str, actor: Actor, now: datetime, version: int | None = None) -> ApiKey:
    """Ends a key for ever, its previous secret too. Revoking a revoked key changes nothing."""
    reason = checked_reason(reason)
    with transaction.atomic():
        key, tenant = _locked(key_id, version)
        if key.state == ApiKey.State.REVOKED:
            return key
        key.state, key.revoked_at, key.rotation_nonce = ApiKey.State.REVOKED, now, ""
        key.version += 1
        key.live_number = next_live_number()
        key.save(update_fields=["state", "revoked_at", "rotation_nonce", "version", "live_number"])
        _record(
            key,
            tenant,
            "key.revoke",
            actor,
            now,
            reason,
            before={"state": "active"},
            after={"state": "revoked"},
        )
        ring("policy.sign_live")
    return key


def rotate_key(
    *,
    key_id: int,
    rotation_id: str,
    overlap: timedelta,
    reason: str,
    actor: Actor,
    now: datetime,
    end_overlap: bool = False,
) -> IssuedKey:
    """Gives the key a new secret; the present one works for `overlap` longer. Id, budget and limits stay.

    Repeating `rotation_id` rotates nothing. For REPEAT_WITHIN the repeat gets the same secret again, so a lost answer
    costs nothing: the secret is made of the rotation id, a nonce in the row and the server's key, and the row holds
    only its hash. Later a repeat gets the key without a secret.
    Raises ValidationError while an earlier overlap runs, unless `end_overlap`: the older secret would stop at once.
    """
    reason = checked_reason(reason)
    _check_rotation(rotation_id, overlap)
    with transaction.atomic():
        key, tenant = _locked(key_id, None)
        if key.state == ApiKey.State.REVOKED:
            raise ValidationError("A revoked key cannot be rotated: create a new one.")
        if key.rotation_id == rotation_id:
            return IssuedKey(key, _same_secret(key, now))
        running = key.previous_hash and key.previous_valid_until and key.previous_valid_until > now
        if running and not end_overlap:
            raise ValidationError(
                {"end_overlap": "The overlap of the last rotation still runs: say that its older secret may stop now."}
            )
        before = {"prefix": key.prefix, "previous_valid_until": key.previous_valid_until}
        key.previous_hash = key.secret_hash if overlap else ""
        key.previous_valid_until = now + overlap if overlap else None
        key.rotation_id, key.rotation_nonce, key.rotated_at = rotation_id, secrets.token_hex(32), now
        key.prefix = _random(8)
        secret = _rotated_secret(key)
        key.secret_hash = secret_hash(secret)
        key.version += 1
        key.live_number = next_live_number()
        key.save(
            update_fields=[
                "previous_hash", "previous_valid_until", "rotation_id", "rotation_nonce", "rotated_at", "prefix",
                "secret_hash", "version", "live_number",
            ]
        )  # fmt: skip
        after = {"prefix": key.prefix, "previous_valid_until": key.previous_valid_until}
        _record(key, tenant, "key.rotate", actor, now, reason, before=before, after=after)
        ring("policy.sign_live")
    return IssuedKey(key, secret)


def secret_hash(secret: str) -> str:
    """What the row keeps of a secret: SHA-256 in hex. A secret has 256 random bits, so no salt is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def snapshot(key: ApiKey) -> dict[str, Any]:
    """The fields that the audit log compares."""
    return {field: getattr(key, field) for field in EDITABLE} | {"classes": list(key.classes)}


def _locked(key_id: int, version: int | None) -> tuple[ApiKey, Tenant]:
    """Tenant first, then key: the order of every action that needs both."""
    tenant_id = ApiKey.objects.values_list("tenant_id", flat=True).get(pk=key_id)
    tenant = Tenant.objects.select_for_update().get(pk=tenant_id)
    key = ApiKey.objects.select_for_update().get(pk=key_id)
    if version is not None and key.version != version:
        raise Stale(key)
    return key, tenant


def _check_rotation(rotation_id: str, overlap: timedelta) -> None:
    if not 8 <= len(rotation_id) <= 64:
        raise ValidationError({"rotation_id": "Name the rotation with 8 to 64 characters, a new name each time."})
    if not timedelta(0) <= overlap <= OVERLAP_MAX:
        raise ValidationError({"overlap_hours": f"The overlap is 0 to {OVERLAP_MAX.days * 24} hours."})


def _rotated_secret(key: ApiKey) -> str:
    message = f"{key.public_id}:{key.rotation_id}:{key.rotation_nonce}"
    digest = salted_hmac("flexband.key.rotation", message, algorithm="sha256").hexdigest()
    return f"fb_{key.prefix}_{digest}"


def _same_secret(key: ApiKey, now: datetime) -> str | None:
    if not key.rotation_nonce or key.rotated_at is None or now - key.rotated_at > REPEAT_WITHIN:
        return None
    secret = _rotated_secret(key)
    # The server's key may have changed since: then it is another secret, and no answer is better than a wrong one.
    return secret if secrets.compare_digest(secret_hash(secret), key.secret_hash) else None


def _check(key: ApiKey, tenant: Tenant, now: datetime) -> None:
    key.name = key.name.strip()
    errors: dict[str, str] = {}
    if not key.name:
        errors["name"] = "Give the key a name, for instance the service that uses it."
    if len(key.name) > 120:
        errors["name"] = "A name has at most 120 characters."
    outside = sorted(set(key.classes) - set(tenant.classes))
    if not key.classes:
        errors["classes"] = "Choose at least one class."
    elif outside:
        errors["classes"] = f"{tenant.slug} does not have {', '.join(outside)}: choose among its own classes."
    if key.default_class not in key.classes:
        errors["default_class"] = "The default class must be one of the key's classes."
    for field in ("max_concurrency", "requests_per_s", "tokens_per_minute"):
        value = getattr(key, field)
        if value is not None and not 0 < value < 2**31:
            errors[field] = "Write a number above 0, or leave it empty for no limit of its own."
    if key.expires_at is not None and key.expires_at <= now and "expires_at" not in errors:
        errors["expires_at"] = "The end lies in the past: choose a later one, or revoke the key."
    if errors:
        raise ValidationError(errors)


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def _record(
    key: ApiKey,
    tenant: Tenant,
    action: str,
    actor: Actor,
    now: datetime,
    reason: str,
    *,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    record(
        actor=actor,
        action=action,
        noun="key",
        object_id=key.public_id,
        tenant_slug=tenant.slug,
        before=before,
        after=after,
        reason=reason,
        now=now,
    )
