"""One example of every message between agent and control plane, with every field told apart by its value."""

from msgspec import Raw

from controlplane.wire import enrolment, lease, policy, problem, report, verification

UUID = "01a227c5-9af1-7369-af9d-034add706e7c"

USAGE_ROW = report.UsageRow(
    UUID, 1_001, 1_002, 3, 4, 5, 6, 7, 8, 9, "job-10", 11, 12, 13, 14, report.FLAG_STREAMED | report.FLAG_ESTIMATED, 16,
    17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, "client-33",
)  # fmt: skip

FIGURES = report.LiveFigures(
    at_us=1,
    slots=[report.SlotLive(1, "ready", "draining", 2, 3, 4, 5, 6, 7, 8, 9, 10)],
    classes=[
        report.ClassLive(
            1,
            2,
            3,
            4,
            UUID,
            "kv_memory",
            5.5,
            6.5,
            7.5,
            8,
            9.5,
            10,
            {"queue_full": 11},
            [(12, 13)],
            [(14, 15)],
            [report.DirectWork(UUID, 16, 17)],
        )
    ],
    tenants=[report.TenantLive(1, 2, 3, 4, 5, 6.5, 7.5, 8.5, 9, 10.5, 11.5, 12.5, 13.5)],
    engine=report.EngineLive("vLLM", 1, 2, 0.5, 4, 5, 6, 7),
)

REPORT = report.Report(
    layout=report.LAYOUT,
    epoch=2,
    seq=3,
    sent_us=4,
    revision=5,
    live_number=6,
    records=[USAGE_ROW],
    slot_usage=[report.SlotUsage(1, 2, 3, 4, True, 5)],
    slot_meters=[report.SlotMeter(1, 2, 3, 4, 5, 6)],
    objectives=[report.ObjectiveCount(1, 2, 3, 4, 5, 6, 7, {"slow": 8})],
    refusals=[report.RefusalCount(1, 2, 3, 44, 5)],
    samples=[report.DecisionSample(UUID, 1, 2, 3, 4, "reject", 45, [report.Check("queue_depth", "9", "8", False)])],
    spends=[report.LeaseSpend(1, 2, 3)],
    trips=[report.Trip(1, 2, 3, "oldest_waiting", 4.5)],
    demand=[report.Demand("t", 1, 2, 3, 4, 5)],
    figures=FIGURES,
    refused_revision=7,
    refused_reason="why",
    seal=True,
    clock=report.ClockReading(offset_us=-1250, error_us=400),
    lost=report.LostReports(first_seq=5, records=-1),
    item_room=[report.ItemRoom(1, 2, 3)],
    items_through=8,
    items_done=[report.ItemDone(1, 2, 3, 4, UUID, 5, 200, Raw(b'{"id":"cmpl-1"}'), "why", 6)],
)

LEASE = report.Lease(1, 2, 3, 4, True)
EXHAUSTED = report.Exhausted(1, "acme monthly", 2)
LIVE_ITEM = report.LiveItem(1, "Ym9keQ==", "kid", "c2ln")

ANSWER = report.Answer(
    accepted_through=1,
    repeat=True,
    revision=2,
    digest="d",
    interval_ms=3,
    server_time_us=4,
    generation=5,
    grants=[report.Grant(1, 2, "lend", 3, "why"), report.Grant(4, 5, "recall", 0)],
    leases=[LEASE],
    exhausted=[EXHAUSTED],
    shares=[report.Share("tenant", 1, 2, 3.5, 4), report.Share("class", 5, None, None, None)],
    live=report.LiveDelta(1, 2, False, [LIVE_ITEM]),
    quarantined=6,
    rotate_key=True,
    drain=True,
    item_jobs=[report.ItemJob(1, UUID, 2, 3, 4, "llama-70b", "/v1/chat/completions", 5, 6)],
    items=[report.Item(1, 2, 3, 4, 5, 6, Raw(b'{"model":"llama-70b"}'))],
    items_cancelled=[report.ItemsCancelled(1, [2, 3])],
    items_give_back=4,
    signing_keys="0123456789abcdef",
    shares_mark="fedcba9876543210",
)

DOCUMENT = policy.PolicyDocument(
    schema=policy.SCHEMA,
    installation=UUID,
    revision=1,
    not_before="2026-11-29T20:00:00+00:00",
    accept_until="2026-12-06T20:00:00+00:00",
    pool=policy.PoolPolicy(
        id=1, slug="chat-70b", model="llama-70b", model_id=2, isolation="reserved", interactive_class="chat",
        batch_class="bulk", fairness_unit="tokens", prompt_weight=3, output_weight=4,
        sizes=policy.SizeBounds([250, 2000], 10, 2000), prefill_us_per_token=5, decode_us_per_token=6,
        flex=policy.FlexPolicy(200, 600, 0.7, 0.25, 0.35, 60, 61, 30, 15, 300, 31, None, 20, "warn"),
        safe_rate=policy.SafeRate({"4": 16.0}, "2026-11-01", "trace", "2027-01-01"),
        slots=[policy.SlotPolicy(7, "s1", "flex", 8, 9, 10), policy.SlotPolicy(11, "s2", "batch", 12, 13, None)],
        batching=policy.Batching(14, 15),
    ),
    classes=[
        policy.ClassPolicy(
            1, "chat", "interactive", 2, 3, 4, 5, 6, 7, 8, 9, 10, "downgrade", "bulk", True, False, 11, ["llama-70b"]
        )
    ],
    tenants=[policy.TenantPolicy(1, "acme", 2, 3, ["chat"], ["llama-70b"], "closed", True, [4, 5])],
    contracts=[
        policy.ContractPolicy(1, "chat-ttft", 2, None, "2026-11-01T00:00:00+00:00", "latency", "ttft", 700)
    ],
    rates=[policy.RatePolicy(1, "chat", 2, "2026-11-01T00:00:00+00:00", 3, 4, 5, 6, 7)],
)  # fmt: skip

MESSAGES = {
    "enrol": enrolment.Enrol("token", "a2V5", "gpu-1", "flexband-agent/0.1.0", 8, "127.0.0.1:9001"),
    "enrolled": enrolment.Enrolled(UUID, 1, "chat-70b", UUID, {"policy:kid": "a2V5"}, True, "redis://broker"),
    "hello": enrolment.Hello("flexband-agent/0.1.0", "boot", [1, 2], "127.0.0.1:9001"),
    "helloed": enrolment.Helloed(
        3, 1, "chat-70b", UUID, {"live:kid": "a2V5"}, {"2": 17}, 1000, 4, "redis://broker", ["packed-1"], 5
    ),
    "report": REPORT,
    "answer": ANSWER,
    "lease_request": lease.LeaseRequest(1, 2, [report.LeaseSpend(3, 4, 5)], 6),
    "lease_answer": lease.LeaseAnswer([LEASE], [EXHAUSTED]),
    "problem": problem.Problem("about:blank", "Conflict", 409, "expected", "Report 4 comes next.", 4),
    "policy_document": DOCUMENT,
    "signed_policy": policy.SignedPolicy("kid", "c2ln", "Ym9keQ=="),
    "live_key": policy.LiveKey(
        1, 2, "k_acme", 3, "active", ["ab", "cd"], 4, 5, ["chat"], "chat", 6, 7.5, 8
    ),
    "live_tenant": policy.LiveTenant(1, 2, "acme", "suspended"),
    "live_class": policy.LiveClass(1, 2, "chat", "active"),
    "live_freeze": policy.LiveFreeze(1, 2, 3),
    "nudge": policy.Nudge("recall", "chat-70b", UUID, 1, 2, 3, "d", 4, "nonce", 5, 6),
    "live_nudge": policy.Nudge(
        "live", "chat-70b", None, None, None, None, None, None, "nonce", 5, 6,
        [report.LiveItem(1, "e30=", "kid", "c2ln")],
    ),
    "signed_nudge": policy.SignedNudge("kid", "c2ln", "Ym9keQ=="),
    "succession": verification.Succession("policy", "old", "new", "a2V5", "c2ln"),
}  # fmt: skip
