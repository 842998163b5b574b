"""A batch item as the request that runs it: no socket, no bearer, one whole answer that is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from controlplane.agent.answers import SENTENCES, bad_request, error_body
from controlplane.agent.api_body import CHAT_PATH, TOKEN_PATHS, BadBody, read_body
from controlplane.agent.api_fields import ApiBody
from controlplane.agent.backends.request import Failure
from controlplane.agent.call import Call
from controlplane.agent.item_ends import NO_RESPONSE, TOO_LARGE
from controlplane.agent.one_shot_body import read_one_shot
from controlplane.agent.registry import ClassEntry, KeyEntry, Registry, TenantEntry
from controlplane.agent.request_ids import new_request_id
from controlplane.core.admission_snapshot import ClassView, KeyView, Overload
from controlplane.core.reasons import Outcome, Reason, answer_for
from controlplane.wire.policy import LiveKey
from controlplane.wire.report import ItemJob

if TYPE_CHECKING:
    from controlplane.agent.engine import Engine
    from controlplane.agent.held_items import HeldItem

RESPONSE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of one item: a report of 8 MiB has to carry it."""
REASON_CHARS: Final = 400
STOPPED: Final = frozenset(
    {
        Reason.KEY_UNKNOWN,
        Reason.KEY_REVOKED,
        Reason.TENANT_SUSPENDED,
        Reason.CLASS_NOT_ALLOWED,
        Reason.MODEL_NOT_ALLOWED,
    }
)
"""Somebody stopped the tenant, its key or the class: the item is handed back and costs no attempt."""
VERDICTS: Final = frozenset({Reason.PROMPT_TOO_LONG, Reason.OUTPUT_TOO_LONG, Reason.NEVER_FITS})
"""The item itself cannot run here, now or later."""


class ItemExchange:
    """The client's side of an item: nobody listens, the record and the item's end say everything."""

    __slots__ = ("asked_class", "bearer", "body", "call", "client_request_id", "job", "path", "traceparent")

    def __init__(self, path: str, body: bytes, job: str, class_slug: str) -> None:
        self.path = path
        self.body = body
        self.bearer = b""
        self.asked_class = class_slug
        self.job = job
        self.client_request_id = ""
        self.traceparent = b""
        self.call: Call | None = None

    def respond(
        self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json"
    ) -> None:
        """Nobody waits for it."""

    def begin_stream(self, headers: bytes, data: bytes) -> None:
        """Items are not streamed."""

    def write(self, data: bytes) -> None:
        """See `begin_stream`."""

    def write_chunks(self, chunks: bytes) -> None:
        """See `begin_stream`."""

    def end_stream(self, data: bytes, *, close: bool = False) -> None:
        """See `begin_stream`."""


def parse(item: HeldItem) -> ApiBody:
    """The fields that admission needs. Raises BadBody."""
    path = item.job.job.endpoint
    parsed = (read_body if path in TOKEN_PATHS else read_one_shot)(item.body, path)
    if parsed.stream:
        raise BadBody("A batch cannot stream: leave stream out.", "stream")
    return parsed


def class_of(registry: Registry, class_id: int) -> ClassEntry | None:
    """The class of the policy in force with that id."""
    return next((entry for entry in registry.classes.values() if entry.policy.id == class_id), None)


def key_of(registry: Registry, job: ItemJob, klass: ClassEntry) -> KeyEntry | None:
    """The key that submitted the job; one without limits where no key did, None where it is not known any more."""
    if job.key_id:
        return registry.keys.get(job.key_id)
    slug = klass.policy.slug
    return KeyEntry(
        LiveKey(
            number=0,
            id=0,
            public_id="",
            tenant_id=job.tenant_id,
            state="active",
            hashes=[],
            previous_until_us=None,
            expires_us=None,
            classes=[slug],
            default_class=slug,
            max_concurrency=None,
            requests_per_s=None,
            tokens_per_minute=None,
        )
    )


def call_of(
    engine: Engine, item: HeldItem, parsed: ApiBody, key: KeyEntry, tenant: TenantEntry, klass: ClassEntry
) -> Call:
    """The request that runs an item now."""
    job, now_us = item.job.job, engine.clock.now_us()
    exchange = ItemExchange(job.endpoint, item.body, job.uuid, klass.policy.slug)
    call = Call(
        engine.next_serial(),
        new_request_id(now_us),
        exchange,
        parsed,
        key=key,
        tenant=tenant,
        klass=klass,
        arrived_us=now_us,
    )
    call.item = item
    prompt = bytes(parsed.messages if job.endpoint == CHAT_PATH else parsed.prompt)
    call.prompt_bytes = len(prompt)
    call.prompt_tokens = (engine.backend.count_prompt(prompt) or 0) if prompt else 0
    call.revision = engine.revision
    if engine.tracer is not None:
        call.trace = engine.tracer.begin(call.request_id, b"")
    call.parsed_us = now_us
    exchange.call = call
    return call


def admitted_key(view: KeyView) -> KeyView:
    """A key as items meet it: its limits count, its expiry does not, for it was good when the job was admitted."""
    return KeyView(
        state=view.state,
        classes=view.classes,
        models=view.models,
        concurrency=view.concurrency,
        request_bucket=view.request_bucket,
        token_bucket=view.token_bucket,
    )


def unbounded_queue(view: ClassView) -> ClassView:
    """A class as items meet it: they wait in a queue of their own, so its bounds are for others to keep."""
    return ClassView(
        view.slug,
        max_prompt_tokens=view.max_prompt_tokens,
        max_output_tokens=view.max_output_tokens,
        overload=Overload.QUEUE,
        active=view.active,
        models=view.models,
        rate_bucket=view.rate_bucket,
    )


def verdict_of(why: Reason | BadBody) -> tuple[int, bytes, str]:
    """Status, response and reason of an item that cannot run at all."""
    if isinstance(why, BadBody):
        return 400, bad_request(str(why), why.param), str(why)[:REASON_CHARS]
    answer, sentence = answer_for(why), SENTENCES[why]
    kind = answer.error_type or "invalid_request_error"
    return answer.status, error_body(sentence, kind, answer.error_code, answer.param), sentence


def unusable(body: bytes) -> Failure | None:
    """Why an answer of 200 cannot be an item's result; None when it can."""
    if len(body) > RESPONSE_BYTES_MAX:
        detail = (
            f"The response has {len(body)} bytes; of a batch item at most {RESPONSE_BYTES_MAX} are kept. "
            "Ask for less output per item."
        )
        return Failure(detail, retryable=False, status=TOO_LARGE)
    if not is_document(body):
        return Failure("The inference server answered 200 with something that is not JSON.", retryable=False)
    return None


def is_document(body: bytes) -> bool:
    """Whether it is one whole JSON document, safe to stand inside another."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def response_of(outcome: Outcome, body: bytes, failure: Failure | None) -> bytes:
    """The engine's document on one line: the result, or what it said of a request that it refused."""
    if outcome is not Outcome.COMPLETED:
        told = failure is not None and 400 <= failure.status < 500 and len(failure.body) <= RESPONSE_BYTES_MAX
        body = failure.body if failure is not None and told and is_document(failure.body) else NO_RESPONSE
    if b"\n" in body or b"\r" in body:
        # Only between tokens, for inside a string they are escaped; a line of a result file has none.
        body = body.replace(b"\r", b" ").replace(b"\n", b" ")
    return body


def reason_of(outcome: Outcome, failure: Failure | None) -> str:
    """Why an item failed, in words; empty where it did not."""
    if outcome is Outcome.COMPLETED:
        return ""
    text = failure.detail if failure is not None and failure.detail else SENTENCES.get(outcome, outcome.value)
    return text[:REASON_CHARS]
