"""Columns that the exchange writes in one step arrive as psycopg's own way of writing them would have them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.errors import DataError
from psycopg.types.json import Jsonb

from controlplane.exchange.database import close_pools, connection

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True, scope="module")
def no_pools_left():
    yield
    close_pools()


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
ODD = st.sampled_from(["", "NULL", '"', "\\", '","', '\\"', "{}", "a,b", " ", "é"])
COLUMNS = st.one_of(
    st.tuples(st.just("bigint"), st.lists(st.integers(-(2**63), 2**63 - 1))),
    st.tuples(st.just("bool"), st.lists(st.booleans())),
    st.tuples(st.just("bytea"), st.lists(st.binary(max_size=40))),
    st.tuples(st.just("text"), st.lists(TEXT | ODD)),
    st.tuples(st.just("text"), st.lists(st.none() | TEXT | ODD)),
    st.tuples(st.just("jsonb"), st.lists(st.recursive(TEXT | ODD | st.integers(0, 9), st.lists, max_leaves=4))),
    st.tuples(st.just("int"), st.lists(st.none() | st.integers(0, 9))),
)


@settings(max_examples=300, deadline=None)
@given(COLUMNS)
def test_what_is_written_is_what_arrives(column):
    kind, values = column
    given = [Jsonb(value) for value in values] if kind == "jsonb" else values
    with connection() as held:
        row = held.execute(f"SELECT ARRAY(SELECT value FROM unnest(%s::{kind}[]) AS value)", (given,)).fetchone()
    assert [bytes(value) if kind == "bytea" else value for value in row[0]] == values


@pytest.mark.parametrize("values", [["a\0b"], ["fine", "\0"]])
def test_a_zero_character_is_refused_before_it_is_sent(values):
    with connection() as held, pytest.raises(DataError):
        held.execute("SELECT %s::text[]", (values,))
