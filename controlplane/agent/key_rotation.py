"""A new signing key for this agent: made, written down, posted, used, and only then the one on disk.

Whatever is killed when, the directory holds a key that the control plane takes: the next key is on disk before it is
posted, the present one stays until a report signed by the next was taken, and a signature that is refused is tried with
the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from controlplane.agent import identity as identities
from controlplane.agent.client import ControlPlane
from controlplane.agent.errors import Refused, Unreachable
from controlplane.wire import signing
from controlplane.wire.rekeying import Rekey, proof_message

log = logging.getLogger(__name__)


class KeyRotation:
    """The next key of one agent, from the answer that asks for it to the report that puts it in force."""

    def __init__(self, state_dir: Path, client: ControlPlane, epoch_now: Callable[[], int]) -> None:
        self._state_dir = state_dir
        self._client = client
        self._epoch_now = epoch_now
        self._next = identities.stored_next_key(state_dir)
        self._posting: asyncio.Task[None] | None = None
        self.on_posted: Callable[[], None] = lambda: None
        """Called when the next key may be used: its first report is due."""
        client.spare_key = self._next

    @property
    def under_way(self) -> bool:
        """Whether there is a next key."""
        return self._next is not None

    def asked(self) -> None:
        """An answer asks for a new key; it asks until a report was signed by it."""
        if self._posting is None or self._posting.done():
            self._posting = asyncio.create_task(self._post())

    async def end(self) -> None:
        """Stop posting."""
        if self._posting is not None:
            self._posting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._posting

    async def _post(self) -> None:
        try:
            if self._next is None:
                self._next = identities.make_next_key(self._state_dir)
        except OSError as error:
            log.error("a new key was asked for and cannot be written down: %s", error)
            return
        public = self._next.public_key().public_bytes_raw()
        proof = signing.sign(self._next, proof_message(self._client.agent, public))
        try:
            await self._client.rekey(Rekey(signing.to_text(public), signing.to_text(proof)), epoch=self._epoch_now())
        except Unreachable as error:
            log.warning("the new key could not be posted, the next answer asks again: %s", error)
        except Refused as refused:
            log.error("the new key was refused (%s): %s", refused.code, refused.detail)
        else:
            if self._next is not None:
                self._client.sign_with(self._next)
                log.info("new key %s is posted", signing.key_id(public))
                self.on_posted()

    def report_taken(self) -> None:
        """A report was taken: if the next key signed it, it is the only one from now on."""
        if self._next is None or self._client.report_key is not self._next:
            return
        try:
            identities.promote_next_key(self._state_dir)
        except OSError as error:
            # Both files stay, and a start from here tries both.
            log.error("the new key is in force and its file cannot be renamed: %s", error)
            return
        log.info("new key %s is in force", signing.key_id(self._next.public_key().public_bytes_raw()))
        self._next = self._client.spare_key = None
