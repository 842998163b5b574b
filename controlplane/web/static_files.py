"""Static files sent as they are read: under ASGI an answer of WhiteNoise is read whole before a byte of it is sent."""

from __future__ import annotations

from collections.abc import AsyncIterator

from django.http import HttpRequest
from whitenoise.middleware import WhiteNoiseFileResponse, WhiteNoiseMiddleware
from whitenoise.responders import Redirect, StaticFile

from controlplane.web.exports import pulled


class FileAnswer(WhiteNoiseFileResponse):
    """A file under WSGI and ASGI; an answer without one, such as 304, takes no thread."""

    block_size = 64 * 1024
    """Bytes of one piece: a thread reads each, and most files are one."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self.file_to_stream is not None:
            async for piece in pulled(self.streaming_content):
                yield piece


class StaticFilesMiddleware(WhiteNoiseMiddleware):
    """WhiteNoise's middleware with answers that stream."""

    @staticmethod
    def serve(static_file: StaticFile | Redirect, request: HttpRequest) -> FileAnswer:
        """As WhiteNoise's own: what it decided, without Django's headers for files."""
        found = static_file.get_response(request.method, request.META)
        answer = FileAnswer(found.file or (), status=int(found.status))
        del answer["content-type"]
        for name, value in found.headers:
            answer[name] = value
        return answer
