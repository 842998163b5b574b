"""How bodies of REST requests are read."""

import io
import json
import re
from typing import Any

from django.conf import settings
from rest_framework.exceptions import APIException, ParseError
from rest_framework.parsers import JSONParser

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""Half of a character outside the basic plane: most come in pairs, one alone is no text."""


class BodyTooLarge(APIException):
    """`most`: the bytes that are read."""

    status_code = 413
    default_code = "body_too_large"

    def __init__(self, most: int) -> None:
        super().__init__(f"The body has more than {most:,} bytes: send less at once.")


class BoundedJSONParser(JSONParser):
    """JSON as people write it, of at most DATA_UPLOAD_MAX_MEMORY_SIZE bytes. Django holds only what it parses itself
    to that limit, and this reads the stream. A document that is nested without end, or has text that no answer, log or
    database can hold, is the sender's mistake too.

    Raises BodyTooLarge before anything of a larger body is parsed.
    """

    whole_text = True
    """False where a broken text costs less than the whole body: the reader has to look for it."""

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body = stream.read(most + 1)
        if len(body) > most:
            raise BodyTooLarge(most)
        try:
            parsed = super().parse(io.BytesIO(body), media_type, parser_context)
            if self.whole_text and _SURROGATE.search(body):
                json.dumps(parsed, ensure_ascii=False).encode()
            return parsed
        except UnicodeEncodeError:
            raise ParseError("The JSON has half of a surrogate pair: write the character whole.") from None
        except RecursionError:
            raise ParseError("The JSON is nested too deeply.") from None
