"""What requests are expected to cost: learnt by tenant and class, told to the control plane, kept over restarts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.agent import estimate_file
from controlplane.agent.reporting import cut_report
from controlplane.core.estimate import BIAS_MAX, BIAS_MIN, DemandEstimate
from controlplane.wire.report import Report
from tests.agent import worlds
from tests.agent.wire_client import WireClient, chat_body, post


def learnt(bias=2.0, output=40.0, ratio=0.3):
    estimate = DemandEstimate(expected_output=output, tokens_per_byte=ratio)
    estimate.bias = bias
    return estimate


def told(estimate):
    return estimate.bias, estimate.expected_output, estimate.tokens_per_byte


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 9), st.integers(1, 9)),
        st.tuples(st.floats(BIAS_MIN, BIAS_MAX), st.floats(0, 1e6), st.floats(0, 1)),
        max_size=9,
    )
)
def test_what_is_kept_is_what_was_learnt(tmp_path_factory, drawn):
    state_dir = tmp_path_factory.mktemp("state")
    estimates = {key: learnt(*values) for key, values in drawn.items()}
    estimate_file.save(state_dir, estimate_file.encode(estimates))
    assert {key: told(one) for key, one in estimate_file.load(state_dir).items()} == drawn


def test_what_learnt_nothing_is_not_kept(tmp_path):
    estimate_file.save(tmp_path, estimate_file.encode({(1, 1): DemandEstimate()}))
    assert estimate_file.load(tmp_path) == {}


@pytest.mark.parametrize("body", [b"", b"[", b"{}", b"[[1]]", b'[["a",1,1,1,1]]'])
def test_a_file_that_cannot_be_read_is_learnt_anew(tmp_path, body, caplog):
    (tmp_path / estimate_file.FILE).write_bytes(body)
    assert estimate_file.load(tmp_path) == {}
    assert "learnt anew" in caplog.text


def test_numbers_that_cannot_be_are_left_out_and_others_bounded(tmp_path):
    (tmp_path / estimate_file.FILE).write_bytes(b"[[1,1,99.0,5.0,7.0],[1,2,-1.0,5.0,0.2]]")
    found = estimate_file.load(tmp_path)
    assert {key: told(one) for key, one in found.items()} == {(1, 1): (BIAS_MAX, 5.0, 1.0)}


async def test_each_tenant_and_class_learns_from_its_own_and_reports_it(make_agent):
    agent = await make_agent(speed=0.0)
    client = await WireClient.connect(agent.port)
    for _ in range(6):
        answer = await client.ask(post(chat_body(max_tokens=60)))
        assert answer.status == 200
    batch = await WireClient.connect(agent.port)
    assert (await batch.ask(post(chat_body(max_tokens=3), key=worlds.BATCH_SECRET))).status == 200
    cut_report(agent.engine, agent.spool, agent.policy, agent.live)
    report = msgspec.json.decode(agent.spool.body_of(agent.spool.state.reports[-1]), type=Report)
    rows = {(row.tenant_id, row.class_id): row for row in report.figures.tenants}
    outputs = [row.output_tokens for row in report.records if row.tenant_id == 1]
    assert min(outputs) <= rows[1, 1].expected_output <= max(outputs)
    assert rows[2, 2].expected_output <= 3
    assert BIAS_MIN <= rows[1, 1].bias <= BIAS_MAX
    assert 0 < rows[1, 1].tokens_per_byte <= 1
    expected = rows[1, 1].expected_output
    assert agent.engine.registry.estimate_of(1, 1).output_tokens(60) == max(1, round(expected))
    assert agent.engine.registry.estimate_of(1, 1).output_tokens(2) == min(2, max(1, round(expected))), (
        "max_output bounds"
    )


async def test_under_declaring_buys_no_capacity(make_agent):
    """Requests that take twice what was estimated count twice in what the next ones wait for."""
    doc = worlds.document(pool={"slots": [worlds.slot(1, places=1)]})
    agent = await make_agent(doc, speed=1.0)
    plain = agent.engine.registry.estimate_of(1, 1)
    plain.learn_output(100)
    waits = []
    for bias in (1.0, 2.0):
        plain.bias = bias
        clients = []
        for _ in range(3):
            one = await WireClient.connect(agent.port)
            one.send(post(chat_body(max_tokens=100, ignore_eos=True)))
            clients.append(one)
            await agent.until(lambda clients=clients: len(agent.engine.calls) == len(clients))
        waits.append(max(call.gpu_us for call in agent.engine.calls.values()))
        for one in clients:
            one.abort()
        await agent.until(lambda: not agent.engine.calls)
    assert waits[1] == pytest.approx(2 * waits[0], rel=0.01)


async def test_a_lent_slot_counts_how_long_a_request_stays_beside_others(make_agent):
    """Its estimate is its share of the slot: beside seven others it stays for eight times that."""
    unsafe = [worlds.class_policy(), worlds.class_policy("bulk", kind="batch", retry_safe=False)]
    slots = [worlds.slot(1), worlds.slot(2, "batch"), worlds.slot(3, "flex", places=8)]
    agent = await make_agent(worlds.document(classes=unsafe, pool={"slots": slots}), speed=1)
    bound_us = agent.engine.drain_bound_us
    per_token_us = agent.engine.registry.rates.decode_us_per_token
    for share, fits in ((0.9, True), (1.1, False)):
        tokens = int(share * bound_us / 4 / 8 / per_token_us)
        connection = await WireClient.connect(agent.port)
        connection.send(post(chat_body(max_tokens=tokens, ignore_eos=True), key=worlds.BATCH_SECRET))
        await agent.until(lambda: len(agent.engine.calls) == 1)
        (call,) = agent.engine.calls.values()
        assert call.fits_drain is fits, (call.raw_gpu_us, bound_us)
        connection.writer.close()
        await agent.until(lambda: not agent.engine.calls)
