"""Whatever way a stream is cut into chunks and reads, the same bytes pass and the same is read from it."""

import asyncio
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.agent.backends.base import BackendRequest
from controlplane.agent.backends.openai import OpenAIBackend, UpstreamRun
from controlplane.agent.backends.sse import EventStream
from controlplane.agent.backends.upstream_connection import UpstreamConnection
from controlplane.agent.chunks import LINES_BY_READ, READS_KNOWN, chunk, unchunked
from tests.agent import event_streams, worlds
from tests.agent.event_streams import meaning_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
several = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces, cut at some places."""
    at = sorted({place % (len(data) + 1) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(at)]


places = st.lists(st.integers(0, 100_000), max_size=12)


@several
@given(sent=event_streams.events(), where=places, hide=st.booleans())
def test_cut_anywhere_events_mean_the_same(sent, where, hide):
    events, passed = EventStream(hide_usage=hide), b""
    for piece in cut(b"".join(event.data for event in sent), where):
        passed += events.feed(piece)
    passed += events.finish()
    told = meaning_of(sent, hide_usage=hide)
    assert passed == told.visible
    assert (events.tokens, events.error, events.done) == (told.tokens, told.error, told.done)
    assert (events.usage and events.usage.completion_tokens) == told.usage and events.is_total == told.total


class Sink:
    """Keeps what an attempt tells."""

    def __init__(self) -> None:
        self.data, self.tokens, self.reads, self.usage, self.failure = b"", 0, 0, None, None

    def prefill_began(self) -> None: ...

    def chunk(self, data: bytes, tokens: int, *, framed: bool = False) -> None:
        self.data += unchunked(data) if framed else data
        self.tokens += tokens
        self.reads += 1

    def finished(self, usage, body: bytes) -> None:
        self.data += body
        self.usage = usage

    def failed(self, failure) -> None:
        self.data += failure.body
        self.failure = failure


class Wire(asyncio.Transport):
    """A connection to nowhere: what comes from the other side is handed over by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


def asking() -> tuple[UpstreamConnection, UpstreamRun, Sink]:
    """A connection on which a streamed request has been sent."""
    backend, sink = OpenAIBackend("http://127.0.0.1:9"), Sink()
    request = BackendRequest("r1", "/v1/chat/completions", b"{}", worlds.MODEL, 1, True, False, 7, 8, 1, 100)
    run, connection = UpstreamRun(backend, request, sink), UpstreamConnection(backend)
    connection.connection_made(Wire())
    connection.send(run)
    return connection, run, sink


def framed(pieces: list[bytes], form: bytes) -> bytes:
    return b"".join((form % len(piece)) + b"\r\n%b\r\n" % piece for piece in pieces if piece)


async def answered(reads: list[bytes]) -> tuple[UpstreamRun, Sink]:
    connection, run, sink = asking()
    for read in reads:
        if read:
            connection.data_received(read)
    return run, sink


@several
@given(
    sent=event_streams.events(),
    chunks=st.none() | places,
    reads=st.sampled_from(["chunks", "whole"]) | places,
    form=st.sampled_from([b"%x", b"%X", b"%04x", b"%x;name=value"]),
)
def test_chunked_anyhow_the_same_passes(sent, chunks, reads, form):
    """A chunk for each event, which repeats what was before, or chunks that are cut anywhere; reads the same."""
    pieces = [event.data for event in sent]
    if chunks is not None:
        pieces = cut(b"".join(pieces), chunks)
    body = framed(pieces, form)
    if reads == "chunks":
        parts = [HEAD, *(framed([piece], form) for piece in pieces), b"0\r\n\r\n"]
    else:
        parts = cut(HEAD + body + b"0\r\n\r\n", [] if reads == "whole" else reads)
    run, sink = asyncio.run(answered(parts))
    told = meaning_of(sent, hide_usage=True)
    assert sink.data == told.visible
    assert sink.tokens == run.events.tokens == told.tokens
    assert (run.events.error, run.events.done, run.events.is_total) == (told.error, told.done, told.total)
    assert (sink.failure is None) == (told.whole and not told.error)


def word(text: str, behind: str = "") -> bytes:
    return b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%b"}%b}]}\n\n' % (text.encode(), behind.encode())


def test_what_repeats_is_not_looked_into_and_what_does_not_is():
    events = EventStream(hide_usage=True)
    first = word("a")
    assert not events.repeats(first, 0, len(first)), "nothing was before it"
    assert events.feed(first) == first
    for same in (word("b"), word("several words, and [DONE]"), word("\\n")):
        assert events.repeats(same, 0, len(same))
    assert events.tokens == 4
    others = (word(""), word('\\"'), word("a", ',"x":1'), word("a\n\ndata: b"), word("a\rb"), first[1:], first * 2)
    for other in (*others, first.replace(b'"c"', b'"d"'), first.replace(b"}}]}", b"}]}}")):
        assert not events.repeats(other, 0, len(other)), other
    assert events.tokens == 4
    assert events.feed(b"data: [DONE]\n\n") == b""
    assert not events.repeats(first, 0, len(first)), "what stands behind the end is not passed on"


def test_a_choice_that_ended_does_not_end_what_goes_on_behind_it():
    events = EventStream(hide_usage=True)
    going_on = word("a")
    events.feed(going_on)
    events.feed(b'data: {"choices":[{"index":1,"delta":{},"finish_reason":"stop"}]}\n\n')
    assert events.complete
    assert events.repeats(going_on, 0, len(going_on)) and not events.complete


async def test_a_chunk_passes_in_its_framing_and_one_with_a_wrong_size_does_not():
    connection, run, sink = asking()
    connection.data_received(HEAD + framed([word("a")], b"%x"))
    before = run.events.tokens
    connection.data_received(framed([word("b")], b"%X"))
    assert (run.events.tokens, sink.data) == (before + 1, word("a") + word("b"))
    connection.data_received(framed([word("c")], b"%x"))
    assert (run.events.tokens, sink.data) == (before + 2, word("a") + word("b") + word("c"))
    # One byte more than it says: no chunk ends there.
    wrong = framed([word("d")], b"%x").replace(b"data", b"ddata", 1)
    connection.data_received(wrong)
    assert sink.failure is not None and "not HTTP" in sink.failure.detail
    assert sink.data == word("a") + word("b") + word("c")


async def test_a_chunk_of_the_right_length_that_does_not_end_as_one_does_not_pass():
    connection, run, sink = asking()
    connection.data_received(HEAD + framed([word("a")], b"%x"))
    connection.data_received(framed([word("b")], b"%x")[:-2] + b"ab")
    assert sink.failure is not None and "not HTTP" in sink.failure.detail
    assert run.ended and b"ab" not in sink.data


async def test_a_chunk_of_the_right_length_that_says_another_does_not_pass():
    connection, _, sink = asking()
    connection.data_received(HEAD + framed([word("a")], b"%x"))
    right = framed([word("b")], b"%x")
    size = int(right.partition(b"\r\n")[0], 16)
    connection.data_received(right.replace(b"%x" % size, b"%x" % (size + 1), 1))
    assert sink.failure is not None and "not HTTP" in sink.failure.detail


def test_the_length_of_a_read_says_how_its_one_chunk_begins():
    lines = {len(chunk(bytes(size))): chunk(bytes(size)).partition(b"\0")[0] for size in range(1, 5_000)}
    assert len(LINES_BY_READ) == READS_KNOWN
    assert [lines.get(length, b"") for length in range(READS_KNOWN)] == LINES_BY_READ
