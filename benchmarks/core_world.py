"""One agent's decisions under a standing backlog: what `benchmarks/core.py` times, step by step.

Every tenant waits in both classes throughout: nine interactive requests and one of batch each. All places are taken,
so a cycle is one arrival that queues and one running request that ends and makes room for the next.
"""

from __future__ import annotations

import random
from collections import deque
from time import perf_counter_ns

from controlplane.agent.refusal_log import decision_sample
from controlplane.core.admission import decide, explain_checks, reserve
from controlplane.core.admission_snapshot import BudgetView, ClassView, KeyView, Snapshot, TenantView
from controlplane.core.class_queue import SchedulingClass
from controlplane.core.pricing import RateCard
from controlplane.core.queued_request import QueuedRequest
from controlplane.core.reservations import ConcurrencyCounter, LeasePurse, Reservation, TokenBucket
from controlplane.core.scheduling import Scheduler
from controlplane.core.slot_states import Band
from controlplane.core.slots import ClassKind, Isolation, SlotSpec

BANDS = (Band.INTERACTIVE,) * 4 + (Band.FLEX,) * 2 + (Band.BATCH,) * 2
PLACES = 16
KV_TOKENS = 400_000
PER_TENANT = 10
CHUNKS = 4
"""Reports of produced output in one request's life."""
CARD = RateCard(500_000_000, 50_000_000, 1_500_000_000, 2_000_000_000)
STEPS = (
    "admission",
    "reserve",
    "offer",
    "dispatch_none",
    "produced",
    "release",
    "settle",
    "dispatch",
    "dispatch_again",
)


class Sizes:
    """What one request asks for, drawn before anything is timed."""

    __slots__ = ("gpu_us", "kv_tokens", "max_output", "output", "prompt", "slug", "tenant")

    def __init__(self, rng: random.Random, tenant: int, slug: str) -> None:
        self.tenant, self.slug = tenant, slug
        self.prompt, self.output = rng.randint(50, 2_000), rng.randint(10, 500)
        self.max_output = 2 * self.output
        self.kv_tokens = self.prompt + self.output
        self.gpu_us = 100 * self.prompt + 4_000 * self.output


class World:
    """An agent with eight slots, `tenants` tenants and ten queued requests of each."""

    def __init__(self, tenants: int, isolation: Isolation = Isolation.RESERVED, min_share_ppm: int = 0) -> None:
        self.rng = random.Random(tenants)
        classes = (
            SchedulingClass(slug="chat", kind=ClassKind.INTERACTIVE, aging_us=30_000_000, queue_timeout_us=10**12),
            SchedulingClass(
                slug="batch",
                kind=ClassKind.BATCH,
                min_share_ppm=min_share_ppm,
                aging_us=10**12,
                queue_timeout_us=10**12,
            ),
        )
        specs = [SlotSpec(f"s{at}", PLACES, band, KV_TOKENS) for at, band in enumerate(BANDS)]
        self.scheduler = Scheduler(classes, specs, isolation)
        self.now_us = 1_000_000
        self.views = {
            slug: ClassView(
                slug,
                100_000,
                100_000,
                max_queue=10**7,
                max_wait_us=10**12,
                models=frozenset({"m"}),
                rate_bucket=self._bucket(10**6),
            )
            for slug in ("chat", "batch")
        }
        self.tenants = [TenantView(f"tenant-{at:05}", concurrency=ConcurrencyCounter(10**6),
                                   request_bucket=self._bucket(10**6), token_bucket=self._bucket(10**9))
                        for at in range(tenants)]  # fmt: skip
        self.keys = [KeyView(classes=frozenset({"chat", "batch"}), concurrency=ConcurrencyCounter(10**6))
                     for _ in range(tenants)]  # fmt: skip
        self.purses = [LeasePurse(10**15) for _ in range(tenants)]
        self.reservations: dict[int, Reservation] = {}
        self.running: deque[int] = deque()
        self.serial = 0
        self.found: dict[str, list[int]] = {step: [] for step in STEPS}
        for slug in ("chat", "batch"):
            for at in range(tenants):
                self.scheduler.set_weight(slug, self.tenants[at].slug, 1 + at % 4)
        self._fill(tenants)

    def _bucket(self, per_s: int) -> TokenBucket:
        return TokenBucket(rate_micro_per_s=per_s * 10**6, burst_micro=per_s * 10**6, now_us=self.now_us)

    def _fill(self, tenants: int) -> None:
        places = PLACES * len(BANDS)
        backlog = [Sizes(self.rng, at, "chat") for at in range(tenants) for _ in range(PER_TENANT - 1)]
        backlog += [Sizes(self.rng, at, "batch") for at in range(tenants)]
        backlog += [Sizes(self.rng, self.rng.randrange(tenants), "chat") for _ in range(places)]
        backlog += [Sizes(self.rng, self.rng.randrange(tenants), "batch") for _ in range(places)]
        self.rng.shuffle(backlog)
        for sizes in backlog:
            self.now_us += 7
            self.arrive(sizes)

    def cycle(self, sizes: Sizes) -> None:
        """One arrival and one end, a little later each."""
        self.now_us += 500
        self.arrive(sizes)
        self.now_us += 500
        self.end()

    def snapshot(self, sizes: Sizes) -> Snapshot:
        """As the agent takes it, the look at the queue included."""
        at, max_output = sizes.tenant, sizes.max_output
        snapshot = Snapshot(
            self.now_us,
            self.keys[at],
            self.tenants[at],
            self.views[sizes.slug],
            CARD,
            BudgetView(self.purses[at]),
            "m",
            sizes.prompt,
            4 * sizes.prompt,
            max_output,
            sizes.output,
            1,
            60_000_000,
        )
        self.scheduler.observe(snapshot, kv_tokens=sizes.kv_tokens, gpu_us=sizes.gpu_us)
        return snapshot

    def arrive(self, sizes: Sizes) -> None:
        found, scheduler, now_us = self.found, self.scheduler, self.now_us
        began = perf_counter_ns()
        snapshot = self.snapshot(sizes)
        answer = decide(snapshot)
        decided = perf_counter_ns()
        reservation = reserve(snapshot, answer)
        reserved = perf_counter_ns()
        self.serial = serial = self.serial + 1
        scheduler.offer(
            QueuedRequest(
                serial,
                snapshot.tenant.slug,
                sizes.slug,
                now_us,
                prompt_tokens=sizes.prompt,
                output_tokens=sizes.output,
                kv_tokens=sizes.kv_tokens,
                gpu_us=sizes.gpu_us,
            ),
            now_us,
        )
        offered = perf_counter_ns()
        started = scheduler.next_dispatch(now_us)
        looked = perf_counter_ns()
        self.reservations[serial] = reservation
        while started is not None:
            self.running.append(started.id)
            self.reservations[started.id].start()
            started = scheduler.next_dispatch(now_us)
        found["admission"].append(decided - began)
        found["reserve"].append(reserved - decided)
        found["offer"].append(offered - reserved)
        found["dispatch_none"].append(looked - offered)

    def end(self) -> None:
        """The oldest running request ends with what it was estimated at, and the next one starts."""
        found, scheduler, now_us = self.found, self.scheduler, self.now_us
        serial = self.running.popleft()
        request, reservation = scheduler.requests[serial], self.reservations.pop(serial)
        prompt, output, gpu_us = request.prompt_tokens, request.output_tokens, request.gpu_us
        began = perf_counter_ns()
        for _ in range(CHUNKS):
            scheduler.produced(serial, output // CHUNKS)
        produced = perf_counter_ns()
        scheduler.release(serial, now_us, prompt_tokens=prompt, output_tokens=output, gpu_us=gpu_us)
        released = perf_counter_ns()
        reservation.settle(reservation.amount_nanos // 2, prompt + output)
        settled = perf_counter_ns()
        started = scheduler.next_dispatch(now_us)
        dispatched = perf_counter_ns()
        assert started is not None
        self.running.append(started.id)
        self.reservations[started.id].start()
        restarted = perf_counter_ns()
        again = scheduler.next_dispatch(now_us)
        looked = perf_counter_ns()
        assert again is None
        found["produced"].append(produced - began)
        found["release"].append(released - produced)
        found["settle"].append(settled - released)
        found["dispatch"].append(dispatched - settled)
        found["dispatch_again"].append(looked - restarted)

    def explain(self, sizes: Sizes) -> int:
        """Nanoseconds of the explanation of one admission and of its sample for the report."""
        snapshot = self.snapshot(sizes)
        answer = decide(snapshot)
        began = perf_counter_ns()
        decision_sample(
            "01970000-0000-7000-8000-000000000000",
            at_us=self.now_us,
            tenant_id=sizes.tenant,
            key_id=sizes.tenant,
            class_id=1,
            decision=answer.decision,
            reason=answer.reason,
            checks=explain_checks(snapshot),
        )
        return perf_counter_ns() - began

    def draw(self, count: int) -> list[Sizes]:
        """Arrivals that keep the backlog as it is: batch as often as batch places are, chat for the others."""
        return [
            Sizes(self.rng, self.rng.randrange(len(self.tenants)), "batch" if self.rng.random() < 0.25 else "chat")
            for _ in range(count)
        ]
