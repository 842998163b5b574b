"""The agent's outbound calls: enrol, hello, report, lease, new key, policy pull. After enrolment all are signed."""

import asyncio
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.agent.errors import Refused, Unreachable
from controlplane.wire import signing
from controlplane.wire.enrolment import Enrol, Enrolled, Hello, Helloed
from controlplane.wire.lease import LeaseAnswer, LeaseRequest
from controlplane.wire.packed import CONTENT_TYPE, FORM, as_json, is_packed
from controlplane.wire.problem import Problem
from controlplane.wire.rekeying import Rekey, Rekeyed
from controlplane.wire.report import SHARES_HEADER, Answer

MAX_ANSWER_BYTES = 64 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 15.0
LEASE_TIMEOUT_S = 2.0
PACK_FROM_BYTES = 8 * 1024
"""Reports of this size and more are sent with gzip."""

UNSUPPORTED = 415
JSON_TYPE = "application/json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Signed:
    """An answer, and the key that signed what it answers."""

    body: bytes
    key: Ed25519PrivateKey


class ControlPlane:
    """One keep-alive session to the control plane. Raises Unreachable or Refused, nothing else."""

    def __init__(self, base_url: str, key: Ed25519PrivateKey, agent: str, now_us: Callable[[], int]) -> None:
        self._base = base_url.rstrip("/")
        self._key = key
        self.spare_key: Ed25519PrivateKey | None = None
        """The other key of a rotation: what is refused for its signature is sent once more with it."""
        self.report_key: Ed25519PrivateKey | None = None
        """What signed the last report that was taken."""
        self.shares_mark = ""
        """Names the shares in force here, for the next report; empty to be told them all."""
        self.agent = agent
        self._now_us = now_us
        self._packs = True
        self._takes_rows = True
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def enrol(self, enrol: Enrol) -> Enrolled:
        body = msgspec.json.encode(enrol)
        answer = await self._call("POST", "/agent/v1/enrol", body, {})
        return _decoded(answer, Enrolled)

    async def hello(self, hello: Hello) -> Helloed:
        body = msgspec.json.encode(hello)
        helloed = _decoded((await self._signed("POST", "/agent/v1/hello", body, epoch=0)).body, Helloed)
        self._takes_rows = FORM in helloed.report_forms
        return helloed

    async def report(self, body: bytes, *, epoch: int, seq: int) -> Answer:
        """Send the exact bytes of a report, large ones with gzip; a repeat is answered like the first.

        `epoch` is the sender's present one, also for reports of an epoch before it: that is what makes it their owner.
        Whether gzip was used makes no difference to what a repeat is: that goes by the bytes inside. A report in the
        packed form is sent as JSON to a control plane that does not take it.
        """
        try:
            taken = await self._report(body, epoch, seq)
        except Refused as refused:
            if refused.status != UNSUPPORTED and refused.code != "unreadable":
                raise
            taken = await self._report_simpler(body, epoch, seq, refused)
        answer = _decoded(taken.body, Answer)
        self.report_key = taken.key
        return answer

    async def _report_simpler(self, body: bytes, epoch: int, seq: int, refused: Refused) -> _Signed:
        """An older control plane, or something in front of it: first without gzip, then without packed records."""
        if refused.status == UNSUPPORTED and self._packs and len(body) >= PACK_FROM_BYTES:
            self._packs = False
            try:
                return await self._report(body, epoch, seq)
            except Refused as again:
                if again.status != UNSUPPORTED and again.code != "unreadable":
                    raise
                refused = again
        if not is_packed(body) or not self._takes_rows:
            raise refused
        self._takes_rows = False
        return await self._report(body, epoch, seq)

    async def _report(self, body: bytes, epoch: int, seq: int) -> _Signed:
        path, loop = "/agent/v1/report", asyncio.get_running_loop()
        if is_packed(body) and not self._takes_rows:
            body = await loop.run_in_executor(None, as_json, body)
        kind = CONTENT_TYPE if is_packed(body) else JSON_TYPE
        if not self._packs or len(body) < PACK_FROM_BYTES:
            return await self._signed("POST", path, body, epoch=epoch, seq=seq, kind=kind)
        # A full report takes tens of milliseconds, without the interpreter's lock.
        packed = await loop.run_in_executor(None, _packed, body)
        return await self._signed("POST", path, packed, epoch=epoch, seq=seq, coding="gzip", kind=kind)

    async def lease(self, request: LeaseRequest, *, epoch: int) -> LeaseAnswer:
        body = msgspec.json.encode(request)
        answer = await self._signed("POST", "/agent/v1/lease", body, epoch=epoch, timeout_s=LEASE_TIMEOUT_S)
        return _decoded(answer.body, LeaseAnswer)

    async def rekey(self, message: Rekey, *, epoch: int) -> Rekeyed:
        """Post a new key; the same key again is answered the same."""
        body = msgspec.json.encode(message)
        return _decoded((await self._signed("POST", "/agent/v1/key", body, epoch=epoch)).body, Rekeyed)

    def sign_with(self, key: Ed25519PrivateKey) -> None:
        """Sign with another key from now on; the one before becomes the spare."""
        if key is not self._key:
            self._key, self.spare_key = key, self._key

    async def policy(self, digest: str, *, epoch: int) -> bytes:
        """The signed bundle as it was sent."""
        return (await self._signed("GET", f"/agent/v1/policy/{digest}", b"", epoch=epoch)).body

    async def _signed(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        epoch: int,
        seq: int | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        coding: str = "",
        kind: str = JSON_TYPE,
    ) -> _Signed:
        key, spare = self._key, self.spare_key
        try:
            return _Signed(await self._sent(method, path, body, epoch, seq, timeout_s, key, coding, kind), key)
        except Refused as refused:
            if refused.code != "bad_signature" or spare is None:
                raise
            answer = await self._sent(method, path, body, epoch, seq, timeout_s, spare, coding, kind)
            if key is self._key:
                self.sign_with(spare)
            return _Signed(answer, spare)

    async def _sent(
        self,
        method: str,
        path: str,
        body: bytes,
        epoch: int,
        seq: int | None,
        timeout_s: float,
        key: Ed25519PrivateKey,
        coding: str,
        kind: str,
    ) -> bytes:
        stamp = self._now_us() if seq is None else seq
        message = signing.request_message(method=method, path=path, body=body, epoch=epoch, stamp=stamp)
        headers = {
            signing.AGENT_HEADER: self.agent,
            signing.EPOCH_HEADER: str(epoch),
            signing.TIME_HEADER if seq is None else signing.SEQ_HEADER: str(stamp),
            signing.SIGNATURE_HEADER: signing.to_text(signing.sign(key, message)),
        }
        if body:
            headers["content-type"] = kind
        if coding:
            headers["content-encoding"] = coding
        if seq is not None and self.shares_mark:
            headers[SHARES_HEADER] = self.shares_mark
        return await self._call(method, path, body, headers, timeout_s)

    async def _call(
        self, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float = CALL_TIMEOUT_S
    ) -> bytes:
        if self._session is None:
            # Proxies of the environment are not used: the control plane is named on the command line.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=4), trust_env=False)
        if body:
            headers = {"content-type": JSON_TYPE, **headers}
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self._base + path, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await _read_bounded(response, path)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unreachable(f"{method} {self._base}{path}: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise _problem(response.status, answer)
        if response.status != 200:
            raise Unreachable(f"{method} {self._base}{path}: unexpected status {response.status}")
        return answer


def _packed(body: bytes) -> bytes:
    """gzip without a time in it: the same bytes come out each time."""
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(body) + packer.flush()


async def _read_bounded(response: aiohttp.ClientResponse, path: str) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise Unreachable(f"the answer to {path} is over {MAX_ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise Unreachable(f"the control plane's answer is not a {kind.__name__}: {error}") from error


def _problem(status: int, body: bytes) -> Exception:
    try:
        problem = msgspec.json.decode(body, type=Problem)
    except msgspec.DecodeError:
        # Not an answer of the control plane but of something in front of it.
        return Unreachable(f"status {status} without a problem document")
    return Refused(status, problem.code, problem.detail or problem.title, problem.expected)
