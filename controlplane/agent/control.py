"""The conversation with the control plane: enrol, hello, report; what the answers bring is put in force.

Nothing here is on a request's path. While the control plane is away the agent works on with its last policy, cuts fewer
and larger reports, and sends them in order when it is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from typing import Final

from controlplane.agent import identity as identities
from controlplane.agent import reporting
from controlplane.agent.backoff import backoff_s
from controlplane.agent.client import ControlPlane
from controlplane.agent.clock import boot_id, boot_us
from controlplane.agent.engine import Engine
from controlplane.agent.errors import AgentError, Refused, Retired, Superseded, Unreachable
from controlplane.agent.identity import Identity
from controlplane.agent.key_rotation import KeyRotation
from controlplane.agent.lease_desk import LeaseDesk
from controlplane.agent.old_epochs import OldEpochs
from controlplane.agent.options import Options
from controlplane.agent.policy_state import LiveList, PolicyState, Trust
from controlplane.agent.spool import EpochSpool, StoredReport
from controlplane.agent.spool_store import SpoolStore
from controlplane.agent.version import SOFTWARE
from controlplane.agent.waiting import wait_at_most
from controlplane.wire import signing
from controlplane.wire.enrolment import Enrol, Hello
from controlplane.wire.packed import FORM
from controlplane.wire.report import Answer

log = logging.getLogger(__name__)

AWAY_CUT_EVERY_US: Final = 60_000_000
AWAY_CUT_RECORDS: Final = 4_000
TIDY_EVERY_US: Final = 60_000_000
PULL_JITTER_S: Final = 0.2
ASK_KEY_EVERY_US: Final = 600_000_000
"""How often one unknown signing key is asked for."""
AFTER_TRIP_S: Final = (0.15, 0.5)
"""A report on its way holds up the next one, so the first of these already tells of most who wait."""


class Control:
    """One agent's side of the protocol."""

    def __init__(
        self,
        options: Options,
        identity: Identity,
        client: ControlPlane,
        engine: Engine,
        store: SpoolStore,
        policy: PolicyState,
        live: LiveList,
    ) -> None:
        self.options = options
        self.identity = identity
        self.client = client
        self.engine = engine
        self.store = store
        self.policy = policy
        self.live = live
        self.leases = LeaseDesk(client, engine, self.epoch_now)
        engine.flex.on_trip = self._tripped
        engine.items.report_soon = self.report_now
        self.keys = KeyRotation(options.state_dir, client, self.epoch_now)
        self.keys.on_posted = self.report_now
        self.reachable = False
        self.interval_s = 1.0
        self.broker = ""
        self.generation = 0
        self.last_answer_us = 0
        self.trouble = "not connected yet"
        self.on_trust: Callable[[Trust], None] = lambda trust: None
        self._wake = asyncio.Event()
        self._sent_s = 0.0
        self._cut_us = self._tidied_us = 0
        self._too_large = (0, 0)
        self._keys_asked_us: dict[str, int] = {}
        self._hello_due = False
        self._pulling: asyncio.Task[None] | None = None
        self._stopping = False

    def epoch_now(self) -> int:
        return 0 if self.store.current is None else self.store.current.epoch

    @property
    def trust(self) -> Trust:
        stored = self.identity.stored
        if stored is None:
            raise AgentError("this agent has not enrolled yet")
        return Trust(stored.installation, stored.pool, stored.signing_keys)

    def report_now(self) -> None:
        """Do not wait for the interval to pass."""
        self._wake.set()

    def _tripped(self) -> None:
        """Tell of a trip once the requests behind the one that tripped have waited too: the controller may have to
        recall slots of other agents, and would hear of those requests only with the report after this one.
        """
        for after_s in AFTER_TRIP_S:
            asyncio.get_running_loop().call_later(after_s, self.report_now)

    # -- beginning -----------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Enrol where needed, restore policy and live list, get an epoch. Returns when requests can be taken."""
        await self._enrol()
        self.client.agent = self._stored().agent
        self.engine.agent_id = self._stored().agent_id
        self.live.restore(self.trust)
        document = self.policy.restore(self.trust)
        if document is not None:
            self.engine.apply_policy(document, self.live)
            log.info("revision %d is in force from the last run", document.revision)
        self.store.recover()
        await self._hello()

    def _stored(self) -> identities.StoredIdentity:
        if self.identity.stored is None:
            raise AgentError("this agent has not enrolled yet")
        return self.identity.stored

    async def _enrol(self) -> None:
        if self.identity.stored is not None:
            return
        options = self.options
        if not options.enrol_token:
            raise AgentError("this agent has not enrolled yet: give it --enrol-token from the Agents page")
        message = Enrol(
            token=options.enrol_token,
            public_key=signing.to_text(self.identity.public_key),
            name=options.name,
            software=SOFTWARE,
            slots=options.slots,
            address=options.address,
        )
        failures = 0
        while True:
            try:
                enrolled = await self.client.enrol(message)
                break
            except Refused as refused:
                raise AgentError(f"enrolment was refused ({refused.code}): {refused.detail}") from refused
            except Unreachable as error:
                failures += 1
                await self._trouble(f"cannot enrol: {error}", failures)
        self.identity = identities.remember_enrolment(options.state_dir, self.identity, enrolled, options.control_plane)
        log.info(
            "enrolled as %s in pool %s%s",
            enrolled.agent,
            enrolled.pool,
            "" if enrolled.approved else ", not approved yet",
        )

    async def _hello(self) -> None:
        """Get an epoch, which fences any older process of this agent; takes as long as it takes."""
        failures = 0
        while True:
            current = [] if self.store.current is None else [self.store.current]
            # Sealed ones too: a control plane that was restored may not have them any more.
            epochs = [*sorted(self.store.old), *(spool.epoch for spool in current)]
            message = Hello(software=SOFTWARE, boot_id=boot_id(), spooled_epochs=epochs, address=self.options.address)
            sent_us = self.engine.clock.now_us()
            try:
                helloed = await self.client.hello(message)
                break
            except Refused as refused:
                if refused.code == "retired":
                    raise Retired(f"the control plane retired this agent: {refused.detail}") from refused
                failures += 1
                await self._trouble(f"hello was refused ({refused.code}): {refused.detail}", failures)
            except Unreachable as error:
                failures += 1
                await self._trouble(f"no hello: {error}", failures)
        self.engine.clock.compare(sent_us, helloed.server_time_us)
        reporting.follow_clock(self.engine, sent_us)
        self.reachable, self.trouble = True, ""
        self.identity = identities.remember_hello(self.options.state_dir, self.identity, helloed)
        self.engine.agent_id = helloed.agent_id
        self.interval_s = max(0.05, helloed.interval_ms / 1000)
        self.broker = self.options.broker or helloed.broker
        now_us = self.engine.clock.now_us()
        for epoch, seq in helloed.accepted_through.items():
            self.store.accepted(int(epoch), seq, now_us)
        before = self.store.current
        if before is not None:
            # What was counted under the epoch so far is told under it, or both epochs would tell it.
            self._cut(before)
        self.engine.start(self.store.begin(helloed.epoch, now_us))
        self.store.pack_reports(FORM in helloed.report_forms)
        self._cut_us = now_us
        self.on_trust(self.trust)
        self._hello_due = False
        self.generation = max(self.generation, helloed.generation)
        log.info("epoch %d", helloed.epoch)

    def _ask_for_key(self, use: str, kid: str) -> bool:
        """Say hello again for a signing key that is not known here: it brings those that are in use.

        Once for a key in ten minutes; False when that was done and the key is still unknown.
        """
        now_us = self.engine.clock.now_us()
        known = self._keys_asked_us.items()
        asked = self._keys_asked_us = {key: at_us for key, at_us in known if now_us - at_us < ASK_KEY_EVERY_US}
        name = f"{use}:{kid}"
        if name in asked:
            return False
        asked[name] = now_us
        self._hello_due = True
        log.info("signing key %s is not known here: asking for the keys in use", name)
        self.report_now()
        return True

    async def _trouble(self, text: str, failures: int) -> None:
        self.reachable = False
        if text != self.trouble:
            log.warning("%s", text)
        self.trouble = text
        await asyncio.sleep(backoff_s(failures))

    # -- reports -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report until the process ends. Raises Superseded or Retired when it has to."""
        old = asyncio.create_task(OldEpochs(self).run())
        try:
            failures = 0
            while True:
                try:
                    sent = await self._turn()
                except OSError as error:
                    # The disk: what was cut stays in memory until it can be written.
                    self.lost_touch(f"reports cannot be written down: {error}")
                    sent = False
                failures = 0 if sent else failures + 1
                if not sent:
                    await asyncio.sleep(backoff_s(failures))
                if old.done() and not old.cancelled():
                    old.result()
        finally:
            old.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await old

    async def _turn(self) -> bool:
        """Send the oldest report that is not accepted, cutting one when there is none; True when it was taken."""
        spool = self._current()
        if self._hello_due:
            await self._hello()
            return True
        if not spool.state.reports:
            await self._pause()
            self._cut(spool, await reporting.look_around(self.engine, spool))
        elif self._away_for_long(spool):
            self._cut(spool)
        await asyncio.get_running_loop().run_in_executor(None, spool.sync)
        self._tidy()
        return await self._send(spool, spool.state.reports[0]) if spool.state.reports else True

    def _current(self) -> EpochSpool:
        spool = self.store.current
        assert spool is not None, "begin() comes first"
        return spool

    async def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._sent_s + self.interval_s - loop.time()
        if left_s > 0 and not self._current().state.closed_over(AWAY_CUT_RECORDS):
            await wait_at_most(self._wake, left_s)
        self._wake.clear()
        self._sent_s = loop.time()

    def _cut(self, spool: EpochSpool, seen: reporting.Seen | None = None) -> None:
        reporting.cut_report(self.engine, spool, self.policy, self.live, seen=seen)
        self._cut_us = self.engine.clock.now_us()

    def _away_for_long(self, spool: EpochSpool) -> bool:
        waited_us = self.engine.clock.now_us() - self._cut_us
        return waited_us >= AWAY_CUT_EVERY_US or spool.state.closed_over(AWAY_CUT_RECORDS)

    def _tidy(self) -> None:
        now_us = self.engine.clock.now_us()
        if now_us - self._tidied_us >= TIDY_EVERY_US:
            self._tidied_us = now_us
            self.store.tidy(now_us)

    async def _send(self, spool: EpochSpool, report: StoredReport) -> bool:
        body = spool.body_of(report)
        sent_boot_us, sent_us = boot_us(), self.engine.clock.now_us()
        try:
            answer = await self.client.report(body, epoch=spool.epoch, seq=report.seq)
        except Unreachable as error:
            self.lost_touch(str(error))
            return False
        except Refused as refused:
            return self.refused(spool, report, refused)
        self.engine.clock.compare(sent_us, answer.server_time_us)
        self.reachable, self.trouble = True, ""
        now_us = self.engine.clock.now_us()
        spool.accept(max(answer.accepted_through, report.seq), now_us)
        self.last_answer_us = now_us
        self.keys.report_taken()
        self._apply(answer, sent_boot_us=sent_boot_us, sent_us=sent_us)
        return True

    def lost_touch(self, text: str) -> None:
        if self.reachable:
            log.warning("cut off from the control plane, working on with the last policy: %s", text)
        self.reachable, self.trouble = False, text

    def refused(self, spool: EpochSpool, report: StoredReport, refused: Refused) -> bool:
        """A report was not taken; True when the next one may be sent at once."""
        now_us = self.engine.clock.now_us()
        if refused.code == "superseded":
            raise Superseded(
                "a newer process of this agent runs: this one stops. Start one process per state directory"
            )
        if refused.code == "retired":
            raise Retired(f"the control plane retired this agent: {refused.detail}")
        if refused.code == "unknown_epoch" and spool is self.store.current:
            # The control plane was restored from a backup that is older than this epoch.
            log.warning("epoch %d is not known to the control plane: saying hello again", spool.epoch)
            self._hello_due = True
            return True
        if refused.code == "expected" and refused.expected is not None:
            return self._expected(spool, refused.expected, now_us)
        if spool is self.store.current and refused.code in ("conflict", "sealed"):
            raise Superseded(
                f"epoch {spool.epoch} was {'continued' if refused.code == 'conflict' else 'closed'} by another: this "
                "process stops. Start one process per state directory; the next start says hello again"
            )
        if refused.code == "conflict":
            # The number was taken by other bytes: those count, these stay in the spool for a person to compare.
            log.critical("report %d of epoch %d conflicts with one that was taken before", report.seq, spool.epoch)
            spool.accept(report.seq, now_us)
            return True
        if refused.code == "sealed":
            log.error("epoch %d was sealed by the control plane: what was left of it stays here", spool.epoch)
            spool.seal(now_us, refused.detail or "sealed by the control plane")
            return True
        if refused.code == "too_large" and self._recut(spool, report, refused, now_us):
            return True
        self.lost_touch(f"report {report.seq} was refused: {refused}")
        if refused.code != "too_large":
            log.error("report %d was refused: %s", report.seq, refused)
        return False

    def _recut(self, spool: EpochSpool, report: StoredReport, refused: Refused, now_us: int) -> bool:
        """Make a report smaller that was too large; said once for each report."""
        smaller = reporting.recut(spool, report, now_us)
        if self._too_large != (spool.epoch, report.seq):
            self._too_large = spool.epoch, report.seq
            what = "it is sent again smaller" if smaller else "and nothing can be taken off it"
            log.error("report %d of epoch %d was refused: %s; %s", report.seq, spool.epoch, refused, what)
        return smaller

    def _expected(self, spool: EpochSpool, expected: int, now_us: int) -> bool:
        if expected > spool.state.last_seq:
            spool.accept(spool.state.last_seq, now_us)
            return True
        state = spool.state
        if expected <= state.accepted_through:
            # The control plane was restored from a backup: it gets again what it lost.
            first = state.rewind(expected)
            log.warning("resending from report %d of epoch %d", first, spool.epoch)
        else:
            spool.accept(expected - 1, now_us)
            first = state.reports[0].seq if state.reports else expected
        if first > expected and state.reports:
            log.critical("reports %d to %d of epoch %d are lost: saying so", expected, first - 1, spool.epoch)
            reporting.name_lost(spool, state.reports[0], expected, now_us)
        return True

    # -- what an answer brings -----------------------------------------------------------------------------------------

    def _apply(self, answer: Answer, *, sent_boot_us: int, sent_us: int) -> None:
        engine, now_us = self.engine, self.engine.clock.now_us()
        self.interval_s = max(0.05, answer.interval_ms / 1000)
        self._follow_generation(answer.generation)
        engine.flex.apply(answer.grants, sent_boot_us=sent_boot_us)
        engine.leases.apply(answer.leases, answer.exhausted, asked_us=sent_us, now_us=now_us)
        if answer.shares:
            engine.registry.apply_shares(answer.shares, now_us)
            self.client.shares_mark = answer.shares_mark
        elif answer.shares_mark != self.client.shares_mark:
            self.client.shares_mark = ""  # they changed while this answer was under way: the next one has them all
        if self.live.apply(answer.live, self.trust):
            engine.apply_live(self.live)
            if not self.live.whole:
                self.report_now()
        elif self.live.unknown_kid:
            self._ask_for_key("live", self.live.unknown_kid)
        if answer.signing_keys and answer.signing_keys != signing.keys_digest(self.trust.signing_keys):
            self._ask_for_key("all", answer.signing_keys)
        if answer.quarantined:
            log.warning("the control plane set %d rows aside: see the audit page", answer.quarantined)
        engine.draining = answer.drain or self._stopping
        if answer.rotate_key and not self._stopping:
            self.keys.asked()
        if not self._stopping:
            engine.items.interval_us = answer.interval_ms * 1000
            engine.items.answered(answer, sent_boot_us=sent_boot_us)
        self.pull(answer.revision, answer.digest)
        engine.pump(now_us)

    def _follow_generation(self, generation: int) -> None:
        """A restored control plane is told which epochs are here, and gets again what it lost of them.

        The leases of before end with the epoch: it may not know them, or not what was spent of them.
        """
        if 0 < self.generation < generation and not self._stopping:
            log.warning("the control plane was restored (generation %d): saying hello again", generation)
            self._hello_due = True
            self.report_now()
        self.generation = max(self.generation, generation)

    def pull(self, revision: int, digest: str, *, jitter: bool = False) -> None:
        """Fetch a newer revision unless that is under way, or its key is just being asked for."""
        if self._hello_due:
            return
        if self.policy.wants(revision, digest) and (self._pulling is None or self._pulling.done()):
            self._pulling = asyncio.create_task(self._pull(digest, jitter))

    async def _pull(self, digest: str, jitter: bool) -> None:
        if jitter:
            await asyncio.sleep(random.uniform(0, PULL_JITTER_S))  # noqa: S311  spreading load, not a secret
        try:
            bundle = await self.client.policy(digest, epoch=self.epoch_now())
        except (Unreachable, Refused) as error:
            log.warning("policy %s could not be pulled: %s", digest[:12], error)
            return
        document = self.policy.consider(bundle, digest, self.trust, now_us=self.engine.clock.now_us())
        if document is None and self.policy.unknown_kid and self._ask_for_key("policy", self.policy.unknown_kid):
            # Not refused yet: the next answer names it again, and then its key may be known.
            self.policy.forget_refusal()
        elif document is None:
            log.error("revision %s refused: %s", self.policy.refused_revision, self.policy.refused_reason)
        else:
            self.engine.apply_policy(document, self.live)
            log.info("revision %d applied", document.revision)
        self.report_now()

    # -- the end -------------------------------------------------------------------------------------------------------

    async def end(self, within_s: float) -> None:
        """The last report: everything, with the seal. What does not get through waits in the spool."""
        self._stopping = True
        await self.keys.end()
        spool = self.store.current
        if spool is None:
            return
        try:
            reporting.cut_report(self.engine, spool, self.policy, self.live, seal=True)
            spool.sync()
        except OSError as error:
            log.critical("the last report cannot be written down: %s", error)
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while spool.state.reports and loop.time() < until:
            try:
                async with asyncio.timeout(max(0.1, until - loop.time())):
                    sent = await self._send(spool, spool.state.reports[0])
            except (TimeoutError, AgentError):
                return
            if not sent:
                await asyncio.sleep(0.2)
        state = spool.state
        if not state.reports and state.accepted and state.accepted[-1].seal:
            spool.seal(self.engine.clock.now_us())
