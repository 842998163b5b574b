"""What the exchange writes in one step arrives as psycopg's own way would have it; JSON is read as Python reads it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.errors import DataError
from psycopg.types.json import Jsonb

from controlplane.exchange.database import close_pools, connection, read_json

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


NUMBERS = st.integers(-(10**40), 10**40) | st.floats(allow_nan=False, allow_infinity=False)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | ODD, inner, max_size=4),
    max_leaves=12,
)


@given(DOCUMENTS)
def test_json_is_read_as_the_standard_library_reads_it(document):
    text = json.dumps(document)
    found, wanted = read_json(text), json.loads(text)
    assert repr(found) == repr(wanted)
    assert repr(read_json(text.encode())) == repr(wanted)


@pytest.mark.parametrize("text", ["1e400", "[" * 3_000 + "]" * 3_000, "1" * 400 + ".5"])
def test_json_that_few_readers_take_is_read_all_the_same(text):
    try:
        wanted = json.loads(text)
    except RecursionError:
        with pytest.raises(RecursionError):
            read_json(text)
    else:
        assert repr(read_json(text)) == repr(wanted)


def test_json_of_the_database_is_read_by_it():
    with connection() as held:
        row = held.execute("""SELECT '[1, "a", {"b": 1e400}]'::jsonb, '1.50'::jsonb, 'null'::json""").fetchone()
    assert row == ([1, "a", {"b": 10**400}], 1.5, None)
