"""The REST description says enough to make a client from it: names, shapes, and nothing that only a person can read."""

from collections import Counter

import pytest
from drf_spectacular.generators import SchemaGenerator

FREE = {
    "Answered.answer": "of each kind of experiment another",
    "Answered.parameters": "of each kind of experiment others",
    "AskRequest.parameters": "of each kind of experiment others, told where they are wrong",
    "Audit.after": "the changed fields of any noun",
    "Audit.before": "the changed fields of any noun",
    "Batch.admission": "arithmetic to read",
    "Decision.actions": "as decided, to be recomputed",
    "DecisionDetail.actions": "as decided, to be recomputed",
    "DecisionDetail.checks": "as decided, to be recomputed",
    "DecisionDetail.snapshot": "as decided, to be recomputed",
    "Experiment.parameters": "of each kind of experiment others",
    "Job.admission": "arithmetic to read",
    "JobDetail.admission": "arithmetic to read",
    "JobOrderRequest.requests": "bodies of requests in OpenAI's form",
    "Problem.errors": "sentences by field, as deep as the body was",
    "RetriedJob.admission": "arithmetic to read",
    "RevisionDetail.configuration": "what agents get, of the schema it names",
}
"""Where a client gets a plain object, and why."""


@pytest.fixture(scope="module")
def description():
    return SchemaGenerator().get_schema(request=None, public=True)


def operations(description):
    return [
        (f"{method.upper()} {path}", operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if isinstance(operation, dict) and "responses" in operation
    ]


def is_free(schema) -> bool:
    """Whether a schema is an object, or a list or choice of objects, of which no field is told."""
    if not schema or schema.get("additionalProperties") == {}:
        return True
    if any(is_free(part) for name in ("oneOf", "anyOf", "allOf") for part in schema.get(name, [])):
        return True
    if "items" in schema:
        return is_free(schema["items"])
    plain = schema.get("type") == "object" and not schema.get("properties")
    return bool(plain and "additionalProperties" not in schema)


def says_nothing(schema) -> bool:
    """`is_free`, and a JSON field, which has at most a sentence."""
    return is_free({name: value for name, value in schema.items() if name not in ("description", "readOnly")})


def test_every_operation_has_a_name_of_its_own(description):
    names = Counter(operation["operationId"] for _, operation in operations(description))
    assert len(names) > 100 and names.most_common(1)[0][1] == 1
    # generators make names of functions from them
    assert len({name.replace("-", "_").lower() for name in names}) == len(names)


def test_every_answer_but_an_empty_one_has_a_shape(description):
    bare = [
        f"{name} {status}"
        for name, operation in operations(description)
        for status, answer in operation["responses"].items()
        if status != "204"
        and (not answer.get("content") or any(not kind.get("schema") for kind in answer["content"].values()))
    ]
    assert bare == []


def test_bodies_are_made_of_named_shapes(description):
    """A shape without a name gets one from the operation, and of each media type the same one."""

    def named(schema):
        inner = schema.get("items", schema)
        return "$ref" in inner or inner.get("type") not in ("object", None)

    unnamed = [
        f"{name} {kind}"
        for name, operation in operations(description)
        for kind, body in [
            *operation.get("requestBody", {}).get("content", {}).items(),
            *(pair for answer in operation["responses"].values() for pair in answer.get("content", {}).items()),
        ]
        if not named(body["schema"])
    ]
    assert unnamed == []


def test_fields_that_are_known_are_told(description):
    found = {
        f"{name}.{field}"
        for name, schema in description["components"]["schemas"].items()
        for field, shape in schema.get("properties", {}).items()
        if says_nothing(shape)
    }
    assert found == set(FREE)


def test_a_body_is_told_once_as_json_and_pages_name_their_cursors(description):
    """Of several media types of one body a generator makes code that does not load."""
    for name, operation in operations(description):
        kinds = operation.get("requestBody", {}).get("content", {})
        assert sum("json" in kind for kind in kinds) <= 1, name
    pages = [shape for name, shape in description["components"]["schemas"].items() if name.startswith("Paginated")]
    assert len(pages) > 10
    assert all(page["required"] == ["next", "previous", "results"] for page in pages)
    assert all("cursor" in page["properties"]["next"]["description"] for page in pages)
