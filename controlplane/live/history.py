"""The live pages at an instant that has passed: what was asked for, what was recorded, and the frames around it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import orjson
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone

from controlplane.live import recording
from controlplane.live.topics import State
from controlplane.tenants.access import requires

#: Frames of so much time come in one answer.
PIECE = timedelta(minutes=1)
STEPS_S = (-600, -60, -10, -1, 1, 10, 60, 600)
INSTANT_CHARS_MAX = 40


@dataclass(frozen=True)
class Past:
    """A page as it was, or the reason why there is none. `at` is what was asked for."""

    topic: str
    at: datetime
    found: recording.Moment | None
    first: datetime | None
    last: datetime | None

    @property
    def state(self) -> State | None:
        return None if self.found is None else self.found.state

    @property
    def hour(self) -> datetime:
        """Where the slider's hour begins."""
        return self.at.replace(minute=0, second=0, microsecond=0)

    @property
    def second_of_hour(self) -> int:
        return int((self.at - self.hour).total_seconds())

    @property
    def steps(self) -> list[tuple[str, datetime]]:
        """Labels and instants of the buttons around it."""
        return [(_step(seconds), self.at + timedelta(seconds=seconds)) for seconds in STEPS_S]


def _step(seconds: int) -> str:
    size = abs(seconds)
    text = f"{size // 60}\N{NO-BREAK SPACE}min" if size >= 60 else f"{size}\N{NO-BREAK SPACE}s"
    return ("\N{MINUS SIGN}" if seconds < 0 else "+") + text


def instant(text: str) -> datetime | None:
    """ISO 8601; without an offset it is UTC. None for what is no instant of this millennium."""
    text = text[:INSTANT_CHARS_MAX].strip()
    if text[10:11] == " ":
        text = f"{text[:10]}T{text[11:]}"
    try:
        at = datetime.fromisoformat(text.replace(" ", "+"))  # a plus in an address is a space
    except ValueError:
        return None
    try:
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except OverflowError:
        return None
    return at if 2000 <= at.year < 3000 else None


def past(request: HttpRequest, topic: str) -> Past | None:
    """What `?at=` asks for; None without one. Http404 for what is no instant, or lies ahead."""
    text = request.GET.get("at")
    if not text:
        return None
    at = instant(text)
    if at is None or at > timezone.now():
        raise Http404("Give a past instant, such as ?at=2026-11-29T21:04:00Z.")
    span = recording.known_span(topic)
    first, last = span or (None, None)
    return Past(topic, at, recording.moment(topic, at), first, last)


def no_past(request: HttpRequest, past: Past) -> HttpResponse:
    """The page for an instant that nobody recorded: it says what is known."""
    context = {"past": past, "page_state": "unknown", "nav_section": "live"}
    return render(request, "live/no_past.html", context, status=404)


@requires("live.read")
def frames(request: HttpRequest) -> HttpResponse:
    """Frames of a topic (home's without one) in the minute from `from` on (the last one without), one a line, each span
    from a snapshot on."""
    topic = request.GET.get("topic", "fleet")
    begin = instant(request.GET["from"]) if "from" in request.GET else timezone.now() - PIECE
    if not topic.startswith(recording.RECORDED) or begin is None:
        raise Http404("Give ?topic=fleet or pool:NAME, and ?from= an instant.")
    rows = recording.frames_between(topic, begin, begin + PIECE)
    response = HttpResponse(b"\n".join(map(orjson.dumps, rows)), content_type="application/x-ndjson")
    if begin + PIECE < timezone.now() - timedelta(minutes=2):
        response["Cache-Control"] = "private, max-age=3600"
    return response
