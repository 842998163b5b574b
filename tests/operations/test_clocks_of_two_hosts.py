"""An instant of one host's clock is never taken from another's: a negative latency is the mildest thing that gives."""

import ast
import re

import pytest

from tests.operations.source_text import parsed, texts_of

CONTROL_PLANE = {
    "received_at",
    "received_us",
    "reported_at",
    "reported_at_us",
    "posted_at",
    "audited_at",
    "imported_at",
}
AGENT = {"arrived_at", "arrived_us", "ended_at", "ended_us", "sent_us", "sampled_at", "first_byte_at"}
PRESENT = {"now", "now_us"}
"""The control plane's clock outside the agent and the pure core, where whoever calls has one clock only."""
AGENT_ONLY = AGENT - {"ended_at"}
"""Slots and periods end too, by the control plane's clock."""
ONE_CLOCK = ("agent/", "core/", "lab/", "demo/", "supervisor/", "experiments/")
SKEW = "exchange/composition.py"
"""Where the distance of the two clocks is measured, and the only place that may."""


def names(node: ast.AST) -> set[str]:
    """Last parts of what an expression reads."""
    found = {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
    found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {
        one.slice.value
        for one in ast.walk(node)
        if isinstance(one, ast.Subscript) and isinstance(one.slice, ast.Constant) and isinstance(one.slice.value, str)
    }


def across(left: set[str], right: set[str]) -> bool:
    pairs = ((CONTROL_PLANE, AGENT), (AGENT, CONTROL_PLANE), (PRESENT, AGENT_ONLY), (AGENT_ONLY, PRESENT))
    return any(left & a and right & b for a, b in pairs)


def subtractions(file: str, tree: ast.Module) -> list[str]:
    """Places where a file takes an instant of one host from one of the other, in Python or SQL."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and across(names(node.left), names(node.right)):
            found.append(f"{file}:{node.lineno}")
    for one in texts_of(file, tree):
        for left, right in re.findall(r"(\w+)\)* - \(*(?:\w+\.)?(\w+)", one.text):
            if across({left}, {right}):
                found.append(f"{file}:{one.line}")
    return found


def test_no_instant_is_taken_from_one_of_another_host():
    """A start by one clock and an end by another give a negative latency."""
    found = [
        place
        for file, tree in parsed().items()
        if not file.startswith(ONE_CLOCK) and file != SKEW
        for place in subtractions(file, tree)
    ]
    assert found == []


def test_the_distance_of_the_clocks_is_measured_in_one_place():
    source = ast.unparse(parsed()[SKEW])
    assert "clock_offset_us" in source and subtractions(SKEW, parsed()[SKEW])


@pytest.mark.parametrize(
    "source",
    [
        "row.received_at - row.arrived_at",
        "(now - record.arrived_at).total_seconds()",
        "row['ended_us'] - row['received_us']",
        "cursor.execute('SELECT max(r.received_at - r.ended_at) FROM usage_record r')",
    ],
)
def test_the_rule_sees_a_difference_of_two_hosts(source):
    assert subtractions("x.py", ast.parse(source))


@pytest.mark.parametrize("source", ["row.ended_at - row.arrived_at", "now - live.reported_at", "now - slot.ended_at"])
def test_the_rule_leaves_differences_of_one_host(source):
    assert not subtractions("x.py", ast.parse(source))
