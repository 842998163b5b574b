"""Whoever writes many rows that others write too takes them in the order of their keys, so nobody waits in a circle."""

import ast
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.usage.rollup_keys import group_by
from tests.operations.source_text import Text, calls_in, parsed, texts, texts_of

ORDERED_BEFORE = {
    "budgets/shares.py": ["note_demand"],
    "contracts/ingest.py": ["add_objectives"],
    "fleet/ingest.py": ["note_live"],
    "policy/watch.py": ["note_counts"],
    "usage/ingest.py": ["add_slot_usage", "add_slot_meters", "add_refusals"],
    "usage/rollups.py": ["_add"],
}
"""Upserts of arrays that their function put in order: file -> the functions."""
ONE_ROW = {"jobs/item_leases.py": "agent_id = %s", "flex/leadership.py": "(shard)"}
"""Statements of one row: nothing to put in order."""


def upsert_out_of_order(one: Text) -> bool:
    """Whether a statement updates rows that are there in an order that nobody chose."""
    if not re.search(r"ON CONFLICT .*DO UPDATE", one.text):
        return False
    chosen = re.search(r"ORDER BY [^)]*?\)? *ON CONFLICT", one.text) is not None
    return not chosen and not of_one_row(one) and "VALUES" not in one.text and one.file not in ORDERED_BEFORE


def of_one_row(one: Text) -> bool:
    return one.file in ONE_ROW and ONE_ROW[one.file] in one.text


def lock_out_of_order(one: Text) -> bool:
    """Whether a statement waits for the locks of several rows in an order that nobody chose."""
    if "SELECT" not in one.text or not re.search(r"FOR (NO KEY )?UPDATE", one.text):
        return False
    ordered = re.search(r"ORDER BY (?:(?!SELECT).)*FOR (NO KEY )?UPDATE", one.text)
    return not ordered and "SKIP LOCKED" not in one.text and not of_one_row(one)


WAITS = {"jobs/batch_actions.py"}
"""A person asked for these very rows, and the answer says how many there were."""


def claim_that_waits(one: Text) -> bool:
    """Whether a statement takes the next rows of a queue and waits for those that another worker has taken."""
    waits = re.search(r"LIMIT [^ ]+ FOR (NO KEY )?UPDATE", one.text) and "SKIP LOCKED" not in one.text
    return bool(waits) and one.file not in WAITS


def told(rule) -> list[str]:
    return [f"{one.file}:{one.line}" for one in texts() if rule(one)]


def test_upserts_of_many_rows_are_in_the_order_of_their_keys():
    """Several writers of the same rows in orders of their own wait for each other in a circle."""
    assert told(upsert_out_of_order) == []


def test_functions_that_order_before_they_write_do_so():
    for file, functions in ORDERED_BEFORE.items():
        for function in functions:
            assert calls_in(file, function) & {"sorted", "group_by"}, f"{file}: {function}"


def test_locks_of_many_rows_are_taken_in_order_or_skipped():
    assert told(lock_out_of_order) == []


def test_claims_of_a_queue_pass_what_another_has():
    """Workers of one queue that wait for a locked row all wait for the slowest: they skip it."""
    assert told(claim_that_waits) == []


def test_rows_that_may_be_there_already_are_created_in_order():
    loose = []
    for file, tree in parsed().items():
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                names = {word.arg for word in call.keywords}
                if names & {"ignore_conflicts", "update_conflicts"} and "sorted" not in calls_in(file, function.name):
                    loose.append(f"{file}:{call.lineno}")
    assert loose == []


@pytest.mark.parametrize(
    ("rule", "sql"),
    [
        (upsert_out_of_order, "INSERT INTO t SELECT * FROM unnest(%s) ON CONFLICT (id) DO UPDATE SET n = 1"),
        (upsert_out_of_order, "INSERT INTO t SELECT a, array_agg(b ORDER BY b) FROM u GROUP BY a ON CONFLICT (a) "
                              "DO UPDATE SET n = 1"),
        (lock_out_of_order, "SELECT id FROM t WHERE id = ANY(%s) FOR UPDATE"),
        (lock_out_of_order, "SELECT (SELECT 1 FROM u ORDER BY 1) FROM t WHERE a IN (SELECT 1) FOR UPDATE"),
        (claim_that_waits, "SELECT id FROM t ORDER BY id LIMIT %s FOR UPDATE"),
    ],
)  # fmt: skip
def test_the_rules_see_what_they_are_for(rule, sql):
    (one,) = texts_of("x.py", ast.parse(repr(sql)))
    assert rule(one)


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 2**40), st.integers(0, 3)), min_size=1, max_size=60))
def test_groups_come_in_the_order_of_their_columns(rows):
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    assert group_by(columns).keys.T.tolist() == [list(key) for key in sorted(set(rows))]
