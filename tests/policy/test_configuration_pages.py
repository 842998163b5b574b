"""The configuration file in the browser and over REST: who may, plan before apply, lines, keys with successions."""

import json

import pytest
import yaml
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from controlplane.audit.models import AuditEntry
from controlplane.policy.applying import export_text
from controlplane.policy.sections import BY_NAME
from controlplane.policy.signing import ensure_keys, rotate
from controlplane.tenants.models import Tenant
from controlplane.wire.signing import from_text
from controlplane.wire.verification import Succession, follow
from tests import factories
from tests.policy.test_applying import build, edited

PAGE = "/policy/configuration/"


@pytest.fixture
def built(people):
    now = timezone.now()
    build(now, "beta")
    return now


def heavier(sections) -> None:
    next(item for item in sections["tenants"]["items"] if item["slug"] == "group")["weight"] = 4


@pytest.mark.django_db
class TestPage:
    def test_every_reader_downloads_and_an_admin_alone_applies(self, people, built):
        got = people["viewer"].get(PAGE + "export/")
        assert got["content-disposition"].endswith('"flexband.yaml"')
        assert yaml.safe_load(got.getvalue())["flexband"] == 1
        assert "Show the plan" not in people["viewer"].get(PAGE).content.decode()
        assert people["viewer"].post(PAGE, {"text": "x"}).status_code == 403
        assert people["tenant"].get(PAGE + "export/").status_code == 403

    def test_the_plan_is_shown_first_and_applied_with_a_reason(self, people, built):
        text = edited(export_text(built), heavier)
        upload = SimpleUploadedFile("flexband.yaml", text.encode())
        shown = people["admin"].post(PAGE, {"file": upload})
        page = shown.content.decode()
        assert shown.status_code == 200
        assert "edit tenant group: weight 1 -&gt; 4" in page
        assert Tenant.objects.get(slug="group").weight == 1
        form = {"text": text, "against": shown.context["form"]["against"].value(), "confirm": "1"}
        refused = people["admin"].post(PAGE, form)
        assert refused.status_code == 422
        assert "Say why" in refused.content.decode()
        done = people["admin"].post(PAGE, {**form, "reason": "CHG-1"})
        assert (done.status_code, done["location"]) == (302, "/policy/review/")
        assert Tenant.objects.get(slug="group").weight == 4

    def test_what_is_wrong_is_told_with_its_line(self, people, built):
        answer = people["admin"].post(PAGE, {"text": "flexband: 1\nsections:\n  classes: {mode: replace}\n"})
        assert answer.status_code == 422
        assert '<a href="#id_text">Line 3: classes has no items' in answer.content.decode()


@pytest.mark.django_db
class TestExport:
    def test_it_streams_the_same_text_as_a_page_and_as_rest_whatever_its_length(self, people, built, monkeypatch):
        Tenant.objects.filter(slug="group").update(name='M\u00fcller "&" S\u00f6hne \U0001f600')
        whole = export_text(built)
        monkeypatch.setattr("controlplane.policy.applying.ITEMS_A_PIECE", 1)
        page = people["admin"].get(f"{PAGE}export/")
        assert page.streaming and page["Content-Disposition"] == 'attachment; filename="flexband.yaml"'
        pieces = list(page.streaming_content)
        assert b"".join(pieces).decode() == whole and len(pieces) > len(BY_NAME)
        rest = people["admin"].get("/api/v1/policy/configuration/")
        assert rest.streaming and rest["Content-Type"] == "application/json"
        assert json.loads(rest.getvalue()) == {"text": whole}

    @pytest.mark.parametrize("address", [f"{PAGE}export/", "/api/v1/policy/configuration/"])
    def test_what_is_written_after_the_first_byte_is_of_the_instant_of_the_request(self, people, built, address):
        before = export_text(built)
        pieces = iter(people["admin"].get(address).streaming_content)
        first = next(pieces)
        Tenant.objects.update(weight=9)
        text = b"".join([first, *pieces]).decode()
        assert (json.loads(text)["text"] if text.startswith("{") else text) == before

    def test_the_number_of_statements_is_fixed(self, people, built, django_assert_num_queries):
        with CaptureQueriesContext(connection) as few:
            list(people["admin"].get(f"{PAGE}export/").streaming_content)
        for number in range(5):
            factories.tenant(f"more-{number}")
        with django_assert_num_queries(len(few)):
            list(people["admin"].get(f"{PAGE}export/").streaming_content)
        assert len(few) <= 20


@pytest.mark.django_db
class TestRest:
    def test_plan_then_apply_then_nothing_is_left(self, people, built):
        client = people["admin"]
        text = edited(json.loads(client.get("/api/v1/policy/configuration/").getvalue())["text"], heavier)

        def post(path: str, **body):
            return client.post(
                f"/api/v1/policy/configuration/{path}/", json.dumps(body), content_type="application/json"
            )

        plan = post("plan", text=text).json()
        assert [step["sentence"] for step in plan["steps"]] == ["edit tenant group: weight 1 -> 4"]
        assert plan["applied"] is False
        done = post("apply", text=text, reason="CHG-2", against=plan["against"])
        assert (done.status_code, done.json()["applied"]) == (200, True)
        again = post("apply", text=text, reason="CHG-2").json()
        assert (again["applied"], again["steps"]) == (False, [])
        stale = post("apply", text=edited(text, lambda sections: sections["budgets"].update(mode="clear", items=[])),
                     reason="x", against=plan["against"])  # fmt: skip
        assert stale.status_code == 400
        wrong = post("plan", text="flexband: 1\nsections: {}\n")
        assert wrong.status_code == 400
        assert "line 2: Say what happens to classes" in wrong.content.decode()

    def test_under_one_key_a_file_is_applied_once(self, people, built):
        client = people["admin"]
        text = edited(json.loads(client.get("/api/v1/policy/configuration/").getvalue())["text"], heavier)

        def post(path: str, key: str, **body):
            return client.post(
                f"/api/v1/policy/configuration/{path}/", json.dumps(body), content_type="application/json",
                headers={"Idempotency-Key": key},
            )  # fmt: skip

        plan = post("plan", "plan-1", text=text)
        assert post("plan", "plan-1", text=text).json() == plan.json()
        first = post("apply", "apply-1", text=text, reason="CHG-2")
        assert first.json()["applied"] and Tenant.objects.get(slug="group").weight == 4
        Tenant.objects.filter(slug="group").update(weight=7)  # somebody else, in between
        again = post("apply", "apply-1", text=text, reason="CHG-2")
        assert (again.json(), again.headers["Idempotency-Replayed"]) == (first.json(), "true")
        assert Tenant.objects.get(slug="group").weight == 7
        assert post("apply", "apply-1", text=text, reason="another").status_code == 422
        assert AuditEntry.objects.filter(action="tenant.edit").count() == 1
        wrong = post("apply", "apply-2", text="flexband: 1\n", reason="CHG-3")
        assert wrong.status_code == 400, "what failed can be sent again under its key"
        assert post("apply", "apply-2", text=text, reason="CHG-3").json()["applied"]

    def test_public_keys_and_their_successions_are_there_for_whoever_checks_bundles(self, people, built):
        first = ensure_keys(built)["policy"]
        second = rotate("policy", built)
        answer = people["viewer"].get("/api/v1/policy/signing-keys/").json()
        keys = {row["kid"]: row for row in answer["keys"]}
        assert keys[first]["revoked_at"] and not keys[second]["revoked_at"]
        chain = [Succession(**row) for row in answer["successions"]]
        assert second in follow(from_text(keys[first]["public_key"]), "policy", chain)
        assert "private" not in json.dumps(answer)
