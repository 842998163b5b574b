"""Requests put together and answers taken apart: nothing of one client's is ever another's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.agent.embedding_batch import BadAnswer, Waiting, embedding_inputs, merged_body, split_answer
from controlplane.core.batching import Member

texts = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
text_inputs = st.one_of(texts, st.lists(texts, min_size=1, max_size=4))
token_inputs = st.one_of(tokens, st.lists(tokens, min_size=1, max_size=4))
spacing = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")])


def inputs_of(given_input) -> list:
    """As a server reads the field."""
    one = isinstance(given_input, str) or isinstance(given_input[0], int)
    return [given_input] if one else given_input


def body_of(given_input, separators=(",", ":"), ascii_only=True, **more) -> bytes:
    body = {"model": "m", "input": given_input, **more}
    return json.dumps(body, separators=separators, ensure_ascii=ascii_only).encode()


def waiting(body: bytes, number: int, prompt_tokens: int = 10) -> Waiting:
    inputs = embedding_inputs(body)
    return Waiting(Member(number, inputs.shape, 0, len(inputs.pieces)), inputs, prompt_tokens)


def served(body: bytes, total_tokens: int) -> bytes:
    """A server whose embedding of an input is the input itself."""
    rows = [
        {"object": "embedding", "index": index, "embedding": [piece]}
        for index, piece in enumerate(inputs_of(json.loads(body)["input"]))
    ]
    usage = {"prompt_tokens": total_tokens, "total_tokens": total_tokens}
    return json.dumps({"object": "list", "data": rows, "model": "served", "usage": usage}).encode()


@given(
    st.one_of(st.lists(text_inputs, min_size=1, max_size=6), st.lists(token_inputs, min_size=1, max_size=6)),
    spacing,
    st.booleans(),
    st.integers(0, 10_000),
)
def test_everyone_gets_the_rows_of_its_own_inputs_and_a_share_of_the_tokens(
    given_inputs, separators, ascii_only, total
):
    bodies = [body_of(one, separators, ascii_only, user=f"user {n}") for n, one in enumerate(given_inputs)]
    members = [waiting(body, n) for n, body in enumerate(bodies)]
    merged = merged_body([one.inputs for one in members])
    assert b"user" not in json.loads(merged)
    parts = split_answer(served(merged if len(members) > 1 else bodies[0], total), members)
    for part, one in zip(parts, given_inputs, strict=True):
        answer = json.loads(part.body)
        assert [row["embedding"] for row in answer["data"]] == [[piece] for piece in inputs_of(one)]
        assert [row["index"] for row in answer["data"]] == list(range(len(inputs_of(one))))
        assert answer["usage"]["prompt_tokens"] == part.usage.prompt_tokens
    assert sum(part.usage.prompt_tokens for part in parts) == total
    assert all(part.usage.output_tokens == 0 for part in parts)


@given(st.lists(text_inputs, min_size=2, max_size=4), st.integers(-2, 2).filter(bool))
def test_a_row_too_many_or_too_few_is_nobodys(given_inputs, off):
    members = [waiting(body_of(one), n) for n, one in enumerate(given_inputs)]
    answer = json.loads(served(merged_body([one.inputs for one in members]), 5))
    rows = answer["data"]
    answer["data"] = rows[:off] if off < 0 else rows + [{**rows[0], "index": len(rows) + n} for n in range(off)]
    with pytest.raises(BadAnswer, match="inputs and came back with"):
        split_answer(json.dumps(answer).encode(), members)


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ({"given_input": "a"}, {"given_input": ["b", "c"]}, True),
        ({"given_input": "a", "user": "x"}, {"given_input": "b", "user": "y"}, True),
        ({"given_input": "a", "priority": 1}, {"given_input": "b"}, True),
        ({"given_input": "a"}, {"given_input": [1]}, False),
        ({"given_input": "a"}, {"given_input": "b", "dimensions": 2}, False),
        ({"given_input": "a"}, {"given_input": "b", "encoding_format": "float"}, False),
        ({"given_input": "a"}, {"given_input": "b", "truncate_prompt_tokens": 5}, False),
        ({"given_input": "a"}, {"given_input": "b" * 300}, False),
        ({"given_input": "a" * 300}, {"given_input": "b" * 400}, True),
        ({"given_input": [1] * 64}, {"given_input": [2] * 65}, False),
    ],
)
def test_what_may_run_together(one, other, together):
    first, second = (
        embedding_inputs(body_of(fields.pop("given_input"), **fields)) for fields in (dict(one), dict(other))
    )
    assert (first.shape == second.shape) is together


def test_a_member_alone_gets_the_servers_own_bytes():
    member = waiting(body_of("a"), 1)
    answer = served(body_of("a"), 3)
    (part,) = split_answer(answer, [member])
    assert part.body is answer
    assert (part.usage.prompt_tokens, part.usage.estimated) == (3, False)


def test_without_usage_the_expected_tokens_are_told_and_flagged():
    members = [waiting(body_of(text), n, prompt_tokens=7 + n) for n, text in enumerate(("a", "b"))]
    answer = json.loads(served(merged_body([one.inputs for one in members]), 0))
    del answer["usage"]
    parts = split_answer(json.dumps(answer).encode(), members)
    assert [(part.usage.prompt_tokens, part.usage.estimated) for part in parts] == [(7, True), (8, True)]


@pytest.mark.parametrize("count", ["1e3000", "18446744073709551616", "2147483648", "-1", '"7"', "1.5", "{}"])
@pytest.mark.parametrize("members", [1, 2])
def test_a_count_of_tokens_that_cannot_be_is_none(count, members):
    """What was computed is handed out; a number beyond any model would be charged, or would fit no record."""
    held = [waiting(body_of(f"text {number}"), number, prompt_tokens=7) for number in range(members)]
    body = served(merged_body([one.inputs for one in held]), 99)
    told = body.replace(b'"prompt_tokens": 99', b'"prompt_tokens": ' + count.encode())
    assert told != body
    parts = split_answer(told, held)
    assert [(part.usage.prompt_tokens, part.usage.estimated) for part in parts] == [(7, True)] * members
