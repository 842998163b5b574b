"""Headers that answers carry about their request."""

from __future__ import annotations

from controlplane.agent.answers import header_text
from controlplane.agent.call import Call, Exchange


def id_headers(request_id: str, exchange: Exchange) -> bytes:
    """The request's id, and the client's own beside it."""
    headers = b"x-request-id: %b\r\n" % request_id.encode()
    return headers + client_id_header(exchange) if exchange.client_request_id else headers


def client_id_header(exchange: Exchange) -> bytes:
    """The id that the client gave its request."""
    return b"x-client-request-id: %b\r\n" % header_text(exchange.client_request_id)


def class_headers(call: Call) -> bytes:
    """The class that served, and the one that was asked for where it differs; none for one that is not served here."""
    if not call.klass.policy.id:
        return b""
    headers = b"x-flexband-class: %b\r\n" % call.klass.slug_text
    if call.asked is not call.klass:
        headers += b"x-flexband-asked-class: %b\r\n" % call.asked.slug_text
    return headers


def call_headers(call: Call) -> bytes:
    """Headers of an answer to an admitted call."""
    if call.first_dispatch_us and call.estimated_wait_us is not None and call.asked is call.klass:
        # What nearly every answer has, in one piece.
        return b"x-request-id: %b\r\n%bx-flexband-class: %b\r\nx-flexband-queue-ms: %d\r\n%b%d\r\n" % (
            call.request_id.encode(),
            client_id_header(call.exchange) if call.exchange.client_request_id else b"",
            call.klass.slug_text,
            (call.first_dispatch_us - call.arrived_us) // 1000,
            b"x-flexband-estimated-wait-ms: ",
            call.estimated_wait_us // 1000,
        )
    headers = id_headers(call.request_id, call.exchange) + class_headers(call)
    if call.first_dispatch_us:
        headers += b"x-flexband-queue-ms: %d\r\n" % ((call.first_dispatch_us - call.arrived_us) // 1000)
    if call.estimated_wait_us is not None:
        headers += b"x-flexband-estimated-wait-ms: %d\r\n" % (call.estimated_wait_us // 1000)
    return headers
