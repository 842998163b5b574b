"""How bodies of REST requests are read."""

import io
from typing import Any

from django.conf import settings
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import JSONParser


class BodyTooLarge(APIException):
    """`most`: the bytes that are read."""

    status_code = 413
    default_code = "body_too_large"

    def __init__(self, most: int) -> None:
        super().__init__(f"The body has more than {most:,} bytes: send less at once.")


class BoundedJSONParser(JSONParser):
    """JSON as people write it, of at most DATA_UPLOAD_MAX_MEMORY_SIZE bytes. Django holds only what it parses itself
    to that limit, and this reads the stream. A document that is nested without end is the sender's mistake too.

    Raises BodyTooLarge before anything of a larger body is parsed.
    """

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body = stream.read(most + 1)
        if len(body) > most:
            raise BodyTooLarge(most)
        try:
            return super().parse(io.BytesIO(body), media_type, parser_context)
        except RecursionError:
            raise ParseError("The JSON is nested too deeply.") from None
