"""The one client for addresses that a person typed in: resolved once, public only, no redirects, bounded.

The name is resolved here and the connection goes to that very address, so a name that answers differently a moment
later (DNS rebinding) leads nowhere. Ranges that an installation allows stand in `FLEXBAND_OUTBOUND_ALLOW`.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

URL_CHARS_MAX = 500
ANSWER_BYTES_MAX = 4_096
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Refused(ValueError):
    """The address may not be called; the message says why and what to do."""


class Unreachable(OSError):
    """Nothing answered in time, or not over HTTP; the message says what happened."""


@dataclass(frozen=True)
class Answer:
    """Status, headers by lower-case name, and the beginning of the body."""

    status: int
    body: bytes
    took_us: int
    headers: Mapping[str, str] = field(default_factory=dict)


def checked_url(url: str) -> SplitResult:
    """The parts of an http or https address that can be called at all. Raises Refused."""
    if len(url) > URL_CHARS_MAX:
        raise Refused(f"The address has more than {URL_CHARS_MAX} characters.")
    if any(not 33 <= ord(char) <= 126 for char in url):
        raise Refused(
            "The address holds a space, a control character or a letter to be written in per cent, as %C3%A9."
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise Refused("The address cannot be read.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Refused("Write an address such as https://example.com/path.")
    if parts.username is not None or parts.password is not None:
        raise Refused("Leave user name and password out of the address: it is shown on pages. Messages are signed.")
    if port == 0:
        raise Refused("Port 0 cannot be called.")
    return parts


def networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """The ranges of a setting. Raises ValueError with the text that is none."""
    return tuple(ipaddress.ip_network(text.strip()) for text in texts if text.strip())


def embedded(address: Address) -> list[Address]:
    """The address itself and every IPv4 address that it leads to (mapped, 6to4, Teredo, NAT64)."""
    found: list[Address] = [address]
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        found += [one for one in inner if one is not None]
    return found


def is_allowed(address: Address, allowed: Sequence[Network]) -> bool:
    """Public, or within a range that the installation allows."""

    def fits(one: Address) -> bool:
        public = one.is_global and not one.is_multicast and not one.is_reserved
        return public or any(one.version == network.version and one in network for network in allowed)

    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return fits(mapped) if mapped is not None else all(fits(one) for one in embedded(address))


def refuse_address(host: str, allowed: Sequence[Network]) -> None:
    """Raises Refused for an address in figures that may not be called; a name is looked at when it is called."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    if not is_allowed(address, allowed):
        raise Refused(_not_public(host, host))


def _not_public(host: str, address: str) -> str:
    shown = host if host == address else f"{host} ({address})"
    return f"{shown} is not a public address. An operator can allow its range with FLEXBAND_OUTBOUND_ALLOW."


def resolve(host: str, port: int, allowed: Sequence[Network]) -> list[tuple[int, str]]:
    """[(family, address)] of a name, as the resolver orders them. Raises Unreachable; Refused if one is not allowed."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"{host} cannot be resolved: {getattr(error, 'strerror', None) or error}") from error
    addresses = [(int(family), str(place[0])) for family, _, _, _, place in found]
    for _, text in addresses:
        if not is_allowed(ipaddress.ip_address(text.split("%")[0]), allowed):
            raise Refused(_not_public(host, text))
    return addresses


class _Pinned(http.client.HTTPConnection):
    """A connection to addresses that were resolved and checked; the name is for the certificate and the Host header."""

    def __init__(
        self, host: str, port: int, *, addresses: list[tuple[int, str]], tls: ssl.SSLContext | None, timeout_s: float
    ) -> None:
        super().__init__(host, port, timeout=timeout_s)
        self.default_port = 80 if tls is None else 443  # left out of the Host header
        self._addresses, self._tls = addresses, tls
        self._ends_s = time.monotonic() + timeout_s
        self._raw: socket.socket | None = None

    def connect(self) -> None:
        error: OSError | None = None
        for family, address in self._addresses:
            left_s = self._ends_s - time.monotonic()
            if left_s <= 0:
                break
            self._raw = raw = socket.socket(socket.AddressFamily(family), socket.SOCK_STREAM)
            raw.settimeout(left_s)
            try:
                raw.connect((address, self.port))
                self.sock = raw if self._tls is None else self._tls.wrap_socket(raw, server_hostname=self.host)
            except OSError as failed:
                raw.close()
                error = failed
            else:
                return
        raise error or TimeoutError("no address answered in time")

    def cut(self) -> None:
        """Ends whatever the connection waits for, from another thread."""
        for sock in (self.sock, self._raw):
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


def post(
    url: str, body: bytes, headers: Mapping[str, str], *, allowed: Sequence[Network], timeout_s: float = 10.0,
    tls: ssl.SSLContext | None = None,
) -> Answer:  # fmt: skip
    """POSTs `body` and reads the beginning of the answer; see `call`."""
    return call("POST", url, body, headers, allowed=allowed, timeout_s=timeout_s, tls=tls)


def call(
    method: str, url: str, body: bytes, headers: Mapping[str, str], *, allowed: Sequence[Network],
    timeout_s: float = 10.0, tls: ssl.SSLContext | None = None, body_bytes_max: int = ANSWER_BYTES_MAX,
) -> Answer:  # fmt: skip
    """Sends `body` and reads the answer within `timeout_s` in all. A redirect is an answer like any other.

    Of the body at most `body_bytes_max` bytes are read. Raises Refused and Unreachable.
    """
    parts = checked_url(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    began_s = time.monotonic()
    connection = _Pinned(
        host, port, addresses=resolve(host, port, allowed),
        tls=(tls or ssl.create_default_context()) if secure else None, timeout_s=timeout_s,
    )  # fmt: skip
    # A server that drips keeps each single read in time: the watchdog ends the whole.
    watchdog = threading.Timer(timeout_s, connection.cut)
    watchdog.daemon = True
    watchdog.start()
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request(method, path, body=body, headers=dict(headers))
        answer = connection.getresponse()
        found = answer.read(body_bytes_max)
    except (OSError, http.client.HTTPException) as error:
        if time.monotonic() - began_s >= timeout_s:
            raise Unreachable(f"no answer within {timeout_s:g} s") from error
        raise Unreachable(_said(error)) from error
    finally:
        watchdog.cancel()
        connection.close()
    told = {name.lower(): value for name, value in answer.getheaders()}
    return Answer(answer.status, found, int((time.monotonic() - began_s) * 1_000_000), told)


def _said(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not verify: {error.verify_message}"
    if isinstance(error, http.client.HTTPException):
        return f"it does not answer in HTTP: {type(error).__name__}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
