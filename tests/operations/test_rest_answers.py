"""Every operation of the REST description, asked with made-up values beside the names of rows that exist.

No answer may be a fault of ours, nor have a status, a media type, a header or a shape that the description does not
tell of. `FLEXBAND_REST_EXAMPLES=200` asks more of each operation, `FLEXBAND_REST_SEED=n` asks other questions, and
`FLEXBAND_REST_ONLY="GET /api/v1/tenants"` asks fewer operations.
"""

import os
import re
from collections import Counter

import hypothesis
import pytest
import schemathesis
from django.core.signals import request_finished, request_started
from django.core.wsgi import get_wsgi_application
from django.db import close_old_connections
from drf_spectacular.generators import SchemaGenerator
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.generation.feedback import FeedbackSources
from schemathesis.pytest._test_builder import build_operation_test
from schemathesis.specs.openapi import checks

from controlplane.access import token_throttle
from tests.operations.rest_world import World, named

EXAMPLES = int(os.environ.get("FLEXBAND_REST_EXAMPLES", "1"))
# The suite asks every seventh question.
EACH = 1 if "FLEXBAND_REST_EXAMPLES" in os.environ else 7
SEED = int(os.environ.get("FLEXBAND_REST_SEED", "1"))
ONLY = re.compile(os.environ.get("FLEXBAND_REST_ONLY", ""))
ASSERTED = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.unsupported_method,
]  # fmt: skip


@pytest.fixture
def world(db, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(token_throttle, "CALLS_MAX", 10**9)
    settings.JOB_STORAGE = str(tmp_path)
    # The test's transaction is the connection's: it is not given up between requests.
    request_started.disconnect(close_old_connections)
    request_finished.disconnect(close_old_connections)
    yield World()
    request_started.connect(close_old_connections)
    request_finished.connect(close_old_connections)


class Interview:
    """Asks, and keeps what was wrong with answers instead of stopping at the first."""

    def __init__(self, world):
        self.world, self.wrong = world, {}
        self.generated, self.operations, self.statuses = Counter(), Counter(), Counter()

    def ask(self, case):
        label = case.operation.label
        self.generated[label] += 1
        if self.generated[label] % EACH:
            return
        if key := case.headers.get("Idempotency-Key"):
            own = str(self.generated[label])  # or most questions are 422: the key has been used with another body
            case.headers["Idempotency-Key"] = own + key[len(own) :]
        with self.world.one_request():
            response = case.call(headers=self.world.headers)
        self.operations[label] += 1
        self.statuses[response.status_code] += 1
        try:
            case.validate_response(response, checks=ASSERTED)
        except FailureGroup as found:
            for failure in found.exceptions:
                self.keep(case, failure, response)
        except Failure as failure:
            self.keep(case, failure, response)

    def keep(self, case, failure, response):
        words = f"{failure.title}: {' '.join(failure.message.split())[:400]}"
        key = (case.operation.label, response.status_code, failure.title, failure.message[:60])
        self.wrong.setdefault(
            key, f"{case.operation.label} {response.status_code} {words}\n    {case.as_curl_command()[:600]}"
        )


def test_every_answer_is_as_described(world, capsys):
    config = schemathesis.Config.from_dict({"seed": SEED})
    schema = schemathesis.openapi.from_dict(
        named(SchemaGenerator().get_schema(request=None, public=True)), config=config
    )
    schema.app = get_wsgi_application()
    often = hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )  # fmt: skip
    # As the plugin of schemathesis does, which would make the description, seconds, whenever tests are collected.
    interview, feedback = Interview(world), FeedbackSources()
    for result in schema.get_all_operations():
        operation = result.ok()
        if ONLY.search(operation.label):
            world.begin(operation.label)
            build_operation_test(
                config=schema.config, operation=operation, test_func=interview.ask, given_kwargs={}, feedback=feedback,
                explicit_settings=often,
            )()  # fmt: skip
    with capsys.disabled():
        print(
            f"\n  REST: {len(interview.operations)} operations, {interview.operations.total()} questions, answers by "
            f"status: {dict(sorted(interview.statuses.items()))}"
        )
    assert not interview.wrong, "\n".join(["", *interview.wrong.values()])
