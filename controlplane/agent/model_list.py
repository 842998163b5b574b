"""`GET /v1/models`, and one of them by its name: what the caller's key may use here."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from controlplane.agent.answers import Refusal, error_body, refusal_answer
from controlplane.agent.registry import KeyEntry, Registry
from controlplane.core.admission_snapshot import KeyState
from controlplane.core.reasons import Reason

MODELS_PATH: Final = "/v1/models"

_encode = msgspec.json.Encoder().encode


def is_models(path: str) -> bool:
    """Whether a path is the list or one model of it."""
    return path == MODELS_PATH or path.startswith(MODELS_PATH + "/")


def key_refusal(registry: Registry, key: KeyEntry | None, now_us: int) -> Reason | None:
    """Why a key is told nothing, as admission would say it; None when it is in force."""
    if key is None:
        return Reason.KEY_UNKNOWN
    if key.view.state is not KeyState.ACTIVE:
        return Reason.KEY_REVOKED
    if key.view.expires_at_us is not None and now_us >= key.view.expires_at_us:
        return Reason.KEY_EXPIRED
    tenant = registry.tenants.get(key.live.tenant_id)
    return None if tenant is None or tenant.view.active else Reason.TENANT_SUSPENDED


def models_of(registry: Registry, key: KeyEntry) -> list[str]:
    """The models of this agent that a key may name: the pool's one, where tenant, key and a class of both allow it."""
    model, tenant = registry.model, registry.tenants.get(key.live.tenant_id)
    if not model or tenant is None:
        return []
    classes = [
        entry.view
        for slug, entry in registry.classes.items()
        if (key.view.classes is None or slug in key.view.classes)
        and (tenant.view.classes is None or slug in tenant.view.classes)
    ]
    of_class = any(view.models is None or model in view.models for view in classes)
    allowed = all(names is None or model in names for names in (tenant.view.models, key.view.models))
    return [model] if of_class and allowed else []


def models_answer(registry: Registry, path: str, key: KeyEntry | None, now_us: int) -> Refusal:
    """Status, body and headers of the list, of one model, or of why there is none."""
    why = key_refusal(registry, key, now_us)
    if why is not None or key is None:
        return refusal_answer(why or Reason.KEY_UNKNOWN, None)
    models = models_of(registry, key)
    if path == MODELS_PATH:
        return Refusal(200, _encode({"object": "list", "data": [_described(model) for model in models]}), b"")
    name = path.removeprefix(MODELS_PATH + "/")
    if name in models:
        return Refusal(200, _encode(_described(name)), b"")
    message = f"This key has no such model here. {MODELS_PATH} lists what it has."
    return Refusal(404, error_body(message, "invalid_request_error", "model_not_found", "model"), b"")


def _described(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "flexband"}
