"""Live pages: first paint from rows alone, empty, stale and lost states, roles and the doors to requests."""

import itertools
import re
import uuid
from datetime import timedelta

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.contracts.models import ContractVersion, ObjectiveMinute
from controlplane.core.reasons import Outcome
from controlplane.fleet.models import Agent, AgentLive, Pool, Slot, SlotInterval
from controlplane.flex.models import Grant
from controlplane.live import readings, topics
from controlplane.tenants.models import Member
from controlplane.wire.report import FLAG_TOKENLESS
from tests import factories
from tests.live.scene import objective, record

pytestmark = pytest.mark.django_db


def person(role, tenant=None, name=None):
    user = get_user_model().objects.create(username=name or role, password="!")
    Member.objects.create(user=user, role=role, tenant=tenant)
    client = Client()
    client.force_login(user)
    return client


def body(client, name, *args, **query):
    answer = client.get(reverse(name, args=args), query)
    assert answer.status_code == 200, answer.status_code
    return answer.content.decode()


def pool_state(slug, now):
    return topics.pool_state(readings.read(now), Pool.objects.get(slug=slug))


@pytest.fixture(autouse=True)
def now_of_the_scene(monkeypatch, moment):
    """Pages are looked at in the scene's own instants: however long a busy machine takes, no report of it is late."""
    looks = itertools.count()
    monkeypatch.setattr(timezone, "now", lambda: moment + timedelta(milliseconds=next(looks)))


@pytest.fixture
def oncall(installation):
    return person("oncall")


# ---- first paint ----


def test_home_says_what_burns_and_which_stage_takes_the_time(scene, oncall):
    page = body(oncall, "home")
    assert "(1 breached) Live" in page
    assert "favicon-bad.svg" in page
    assert "chat · TTFT" in page and "is burning" in page
    assert ">Queue</span> takes" in page
    for text in ("recalled f2 in chat-70b: batch_slack", "emb-2", "252", "KV memory"):
        assert text in page, text


def test_pool_page_shows_queue_stages_strip_and_why(scene, oncall):
    page = body(oncall, "pool", "chat-70b")
    for text in (
        "Queue takes", "Recall f2", "Lend f1", "214 rate_limit, 38 wait_too_long", "f1 is lent to bulk",
        "Closest to a recall", "Demo values", "Freeze lending", "stack_p99",
    ):  # fmt: skip
        assert text in page, text
    assert reverse("flex-recall", args=[scene.slots["f1"].pk]) in page


def test_buttons_lead_to_the_effect_of_what_they_do(scene, oncall):
    page = body(oncall, "pool", "chat-70b")
    address = reverse("flex-freeze", args=["chat-70b"])
    recall = reverse("flex-recall", args=[scene.slots["f1"].pk])
    unfreeze = reverse("flex-unfreeze", args=["chat-70b"])
    for where in (address, recall):
        assert f'href="{where}"' in page
        assert f'href="{where}"' in body(oncall, "home"), "the page that tells of it has it too"
    assert unfreeze not in page
    form = oncall.get(address).content.decode()
    assert "Frozen and recalled" in form and "Recall every lent slot too" in form
    answer = oncall.post(address, {"reason": "incident", "recall": "on"})
    assert answer.status_code == 302
    assert list(Grant.objects.filter(manual_recall=True).values_list("slot__name", flat=True)) == ["f1"]
    story = oncall.get(answer.url).content.decode()
    assert "Freeze of lending in chat-70b" in story and "Recalled with it" in story
    home, page = body(oncall, "home"), body(oncall, "pool", "chat-70b")
    for shown in (home, page):
        assert f'href="{unfreeze}"' in shown and f'href="{address}"' not in shown
    assert f'href="{answer.url.partition("?")[0]}"' in home, "what changed leads to what came of it"


def test_a_viewer_sees_the_pool_and_no_button_that_acts(scene):
    page = body(person("viewer"), "pool", "chat-70b")
    assert "f1 is lent" in page
    assert reverse("flex-freeze", args=["chat-70b"]) not in page
    home = body(person("finance"), "home")
    assert "is burning" in home and "Freeze lending" not in home and "Recall f1" not in home


def test_a_pool_without_a_flex_slot_has_nothing_to_press(scene, moment):
    assert pool_state("embed-m", moment)["acts"] == []
    Grant.objects.filter(slot=scene.slots["f1"]).update(state="home")
    assert [act["text"] for act in pool_state("chat-70b", moment)["acts"]] == ["Freeze lending"]


def test_a_slot_is_written_as_the_form_that_frames_fill_and_its_name_is_no_markup(scene, oncall):
    one = Slot.objects.filter(pool=scene.pool, band="flex").first()
    Slot.objects.filter(pk=one.pk).update(name="<i>&1")
    page = body(oncall, "home")
    assert "&lt;i&gt;&amp;1" in page and "<i>&1" not in page
    cells = re.findall(r'<span data-key="([^"]*)" class="slot[^>]*>(.*?)</span></span></span>', page)
    names = {re.sub(r">[^<]*", ">", cell.replace(" hidden", "")) for _, cell in cells}
    assert "" in dict(cells), "the form"
    assert len(names) == 1, "rows and the form hold the same values"


def test_a_quiet_home_does_not_speak_of_what_is_unknown(scene, oncall, moment):
    hint = 'data-if="counts.unknown">What is unknown below is not OK'
    ObjectiveMinute.objects.all().delete()
    assert hint in body(oncall, "home")
    minute = moment.replace(second=0, microsecond=0)
    for slug, pool in (("chat-ttft", scene.pool), ("chat-e2e", scene.pool), ("embed-e2e", scene.silent)):
        version = ContractVersion.objects.get(contract__slug=slug)
        for back in range(90):
            objective(version, pool, minute - timedelta(minutes=back), 600, 0)
    AgentLive.objects.update(reported_at=timezone.now())
    page = body(oncall, "home")
    assert "No contract whose figures are known burns" in page
    assert hint not in page and 'data-if="counts.unknown" hidden>What is unknown' in page


def test_numbers_of_the_queue_panel(scene, moment):
    rows = {row["key"]: row for row in pool_state("chat-70b", moment)["queue"]}
    chat = rows[f"c{scene.chat.pk}"]
    assert (chat["depth"], chat["oldest_us"], chat["refused"]) == (19, 410_000, 252)
    assert (chat["present"], chat["expected"], chat["light"], chat["light_word"]) == (33.1, 27.8, "ok", "Within 16 %")
    assert chat["head_why"] == "KV memory: no slot has room for it"
    globex = rows[f"c{scene.chat.pk}t{scene.globex.pk}"]
    assert (globex["light"], globex["refused_why"]) == ("risk", "214 rate_limit, 38 wait_too_long")
    assert rows[f"c{scene.bulk.pk}"]["light_word"] == "No arrivals"


def test_a_tenants_row_says_what_was_learnt_and_what_admission_makes_of_it(scene, moment):
    key = f"c{scene.chat.pk}t{scene.globex.pk}"

    def note():
        return next(row["note"] for row in pool_state("chat-70b", moment)["queue"] if row["key"] == key)

    assert note() == "", "nothing was learnt, or an older agent"
    row = AgentLive.objects.get(agent=scene.agents[0])
    for tenant in row.figures["tenants"]:
        tenant |= {"bias": 1.8, "expected_output": 121.6, "tokens_per_byte": 0.3}
    row.save(update_fields=["figures"])
    assert note() == "its GPU time counts 1.80 times the estimate in waits and admission; 122 output tokens expected"


def test_stages_of_the_tail_add_up_and_own_percentiles_stand_beside(scene, moment):
    state = pool_state("chat-70b", moment)
    for name in ("p50", "p95", "p99"):
        assert sum(row[f"mean_{name}"] for row in state["stages_rows"]) == state["stages_total"][f"mean_{name}"]
        assert sum(row[f"share_{name}"] for row in state["stages_rows"]) == pytest.approx(1)
    assert state["worst"]["stage"] == "queue"
    assert sum(row["own_p95"] for row in state["stages_rows"]) != state["stages_total"]["e2e_p95"]


def test_the_strip_has_each_slot_with_its_history_and_what_no_meter_saw(scene, moment):
    lanes = {lane["key"]: lane for lane in pool_state("chat-70b", moment)["lanes"]}
    assert [span["kind"] for span in lanes["f1"]["spans"]] == ["interactive", "lent"]
    assert [span["kind"] for span in lanes["f2"]["spans"]] == ["interactive", "lent", "draining"]
    assert [span["kind"] for span in lanes["b1"]["spans"]] == ["batch"]
    seen = [span for span in lanes["i3"]["spans"] if span["kind"] == "unobserved"]
    minute = moment.replace(second=0, microsecond=0)
    assert [(span["from"], span["to"]) for span in seen] == [
        ((minute - timedelta(minutes=53)).isoformat(), (minute - timedelta(minutes=49)).isoformat())
    ]


def test_overdue_and_lost_slots_say_so(scene, moment):
    Grant.objects.filter(slot=scene.slots["f2"]).update(state="overdue")
    SlotInterval.objects.filter(slot=scene.slots["f1"], ended_at=None).update(state="lost")
    state = pool_state("chat-70b", moment)
    cells = {row["key"]: row for row in state["cells"]}
    assert (cells["f2"]["kind"], cells["f2"]["chip"]) == ("overdue", "bad")
    assert (cells["f1"]["kind"], cells["f1"]["chip"]) == ("unobserved", "unknown")
    assert "by its own lease it admits no batch" in state["band_note"]
    alerts = topics.alerts(readings.read(moment))["alerts"]
    assert alerts[0]["title"] == "f2 in chat-70b is past its drain bound"
    (lost,) = [row for row in alerts if row["word"] == "Lost"]
    owner = scene.slots["f1"].agent
    assert lost["title"] == f"{owner.name} in chat-70b has vanished: 1 slot is unobserved"
    assert lost["since"] == SlotInterval.objects.get(slot=scene.slots["f1"], ended_at=None).started_at.isoformat()
    assert lost["grade"] == "unknown" and lost["text"].startswith("f1. ") and "retire it" in lost["text"]
    assert lost["url"] == f"/agents/{owner.pk}/"
    SlotInterval.objects.filter(slot=scene.slots["f1"], ended_at=None).update(state="home")
    assert not [row for row in topics.alerts(readings.read(moment))["alerts"] if row["word"] == "Lost"], "it is back"


# ---- empty ----


def test_an_empty_installation_says_what_comes_first(oncall):
    page = body(oncall, "home")
    for text in (
        "No contract has been written yet.",
        "No pool yet.",
        "No class has had a request yet.",
        "Nothing changed.",
    ):
        assert text in page, text
    assert "favicon-unknown.svg" in page
    assert topics.NOBODY in page and topics.CALM not in page, "nobody is no good news"


def test_an_empty_pool_page(oncall):
    factories.workload_class()
    factories.pool("new-pool")
    page = body(oncall, "pool", "new-pool")
    for text in (
        "No slot yet.",
        "This pool has no flex slot.",
        "No class has had a request yet.",
        "No request has ended",
    ):
        assert text in page, text


def test_pages_that_are_not_there_and_people_who_may_not(scene, oncall):
    assert oncall.get(reverse("pool", args=["nowhere"])).status_code == 404
    assert person("tenant", scene.acme, "t").get(reverse("pool", args=["chat-70b"])).status_code == 403
    assert Client().get("/").status_code == 302


# ---- stale and lost ----


def test_silence_is_unknown_never_zero_and_never_ok(scene, oncall, moment):
    AgentLive.objects.update(reported_at=moment - timedelta(seconds=40))
    state = pool_state("chat-70b", moment)
    assert {row["depth"] for row in state["queue"]} == {None}
    assert {row["light"] for row in state["queue"]} == {"unknown"}
    assert {row["css"] for row in state["queue"]} == {"stale"}
    assert {row["kind"] for row in state["cells"]} == {"unobserved"}
    assert {row["grade"] for row in state["contracts"]} == {"unknown"}
    page = body(oncall, "home")
    assert "(3 unknown) Live" in page and "favicon-unknown.svg" in page
    assert "Its numbers are not shown because they may be wrong" in page
    assert "No report: what it applies now is not known." in page


def test_a_report_from_the_future_is_not_fresh(scene, moment):
    AgentLive.objects.update(reported_at=moment + timedelta(seconds=30))
    assert {row["depth"] for row in pool_state("chat-70b", moment)["queue"]} == {None}


def test_one_silent_agent_of_two_is_named_in_the_sum(scene, moment):
    AgentLive.objects.filter(agent=scene.agents[1]).update(reported_at=moment - timedelta(seconds=9))
    state = pool_state("chat-70b", moment)
    assert state["queue"][0]["note"] == "without 1 silent agent"
    kinds = {row["key"]: row["kind"] for row in state["cells"]}
    assert (kinds["i1"], kinds["i2"]) == ("interactive", "unobserved")
    heard = AgentLive.objects.get(agent=scene.agents[0]).reported_at
    assert state["telemetry_at"] == heard.isoformat(), "what the other says is shown: it is not old"
    AgentLive.objects.filter(agent=scene.agents[0]).update(reported_at=moment + timedelta(seconds=30))
    assert pool_state("chat-70b", moment)["telemetry_at"] == (moment - timedelta(seconds=9)).isoformat()


def test_an_agent_that_somebody_drained_is_not_forgotten(scene, oncall, moment):
    Agent.objects.filter(pk=scene.agents[1].pk).update(drain_requested_at=moment - timedelta(hours=3))
    state = topics.fleet(readings.read(moment))
    assert state["agents_meta"] == "1 silent, 1 draining, 1 as desired"
    row = state["agents"][-1]
    assert (row["name"], row["grade"], row["word"]) == ("chat-a2", "neutral", "Draining")
    assert row["url"] == reverse("agent", args=[scene.agents[1].pk]), "there it can be let serve again"
    assert state["agents"][0]["url"] == reverse("agent", args=[scene.agents[2].pk]), "the silent one"
    AgentLive.objects.filter(agent=scene.agents[1]).update(reported_at=moment - timedelta(minutes=5))
    assert {one["word"] for one in topics.fleet(readings.read(moment))["agents"]} == {"Silent"}


def test_a_silent_pool_stays_silent_beside_one_that_is_heard(scene, oncall, moment):
    """Whichever is looked at last: the state of one pool is no other pool's."""
    silent = {slug: pool_state(slug, moment)["facts"]["silent"] for slug in ("chat-70b", "embed-m")}
    turned = {slug: pool_state(slug, moment)["facts"]["silent"] for slug in ("embed-m", "chat-70b")}
    assert silent == turned == {"chat-70b": 0, "embed-m": 1}
    page = body(oncall, "home")
    assert "emb-2" in page and "No report: what it applies now is not known." in page


def test_no_traffic_is_few_data_not_met(scene, moment):
    ObjectiveMinute.objects.all().delete()
    state = pool_state("chat-70b", moment)
    assert {row["grade"] for row in state["contracts"]} == {"unknown"}
    assert {row["burn_5m"] for row in state["contracts"]} == {None}


# ---- tenants' people ----


def test_a_tenants_member_sees_the_own_rows_and_no_others(scene):
    page = body(person("tenant", scene.acme), "home")
    assert "Acme" in page and "412" in page
    assert "globex" not in page and "chat-70b" not in page and "emb-2" not in page


def test_requests_are_found_by_id_tenant_class_and_reason(scene, oncall):
    assert oncall.get(reverse("requests"), {"q": str(scene.request_id)}).status_code == 302
    page = body(oncall, "requests")
    assert str(scene.request_id) in page and str(scene.refused_id) in page
    refused = body(oncall, "requests", reason="rate_limit")
    assert str(scene.refused_id) in refused and str(scene.request_id) not in refused
    assert str(scene.refused_id) not in body(oncall, "requests", tenant="acme")
    assert str(scene.request_id) in body(oncall, "requests", q="client-77")
    assert "No request has this client" in body(oncall, "requests", q="nothing")


@pytest.mark.parametrize("name", ["reason", "class", "pool", "tenant"])
def test_a_filter_that_nothing_can_match_is_refused_with_what_to_do(scene, oncall, name):
    answer = oncall.get(reverse("requests"), {name: "zz"})
    page = answer.content.decode()
    assert answer.status_code == 400 and "there is none of this name" in page and "Choose" in page
    assert str(scene.request_id) not in page and "The newest 0" not in page


def test_a_filter_tells_nobody_which_tenants_there_are(scene):
    stranger = person("tenant", scene.acme)
    foreign, none = (stranger.get(reverse("requests"), {"tenant": slug}) for slug in ("globex", "nobody"))
    assert foreign.status_code == none.status_code == 400
    assert "globex" not in foreign.content.decode().replace('value="globex"', "")


def test_a_request_tells_its_attempts_stages_and_charge(scene, oncall):
    page = body(oncall, "request", scene.request_id)
    assert "Decode took 5,300.0 ms" in page and "1 attempt failed before the last" in page
    assert "upstream_error" in page and "not charged" in page
    assert "0.00104784" in page


def test_work_without_tokens_shows_dashes_and_no_zeros(scene, moment, oncall):
    tensors = uuid.uuid4()
    record(scene, tensors, moment, outcome=Outcome.COMPLETED, queue_us=5, decode_us=5, flags=FLAG_TOKENLESS)
    page = body(oncall, "request", tensors)
    assert page.count("not made of tokens") == 2
    assert "214" not in page.split("Charge")[0] and "cached" not in page.split("Charge")[0]


def test_a_refused_request_shows_every_check_and_the_first_that_failed(scene, oncall):
    page = body(oncall, "request", scene.refused_id)
    assert "Refused at admission: rate limit" in page
    assert "0.3 tokens in the bucket" in page
    assert page.count('<tr class="bad">') == 1


def test_a_request_of_another_tenant_looks_like_one_that_never_was(scene):
    stranger = person("tenant", scene.acme)
    assert stranger.get(reverse("request", args=[scene.request_id])).status_code == 404
    assert stranger.get(reverse("request", args=[uuid.uuid4()])).status_code == 404
    assert "globex" not in body(stranger, "requests")
    assert person("tenant", scene.globex, "g").get(reverse("request", args=[scene.request_id])).status_code == 200


def test_tables_come_as_csv_too(scene, oncall):
    answer = oncall.get(reverse("pool-queue-csv", args=["chat-70b"]))
    text = b"".join(answer.streaming_content).decode()
    assert "globex" in text and "410000" in text
    answer = oncall.get(reverse("pool-stages-csv", args=["chat-70b"]))
    assert "queue" in b"".join(answer.streaming_content).decode()


def test_no_inline_script_and_no_style_element(scene, oncall):
    for name, args in (("home", ()), ("pool", ("chat-70b",)), ("request", (scene.request_id,)), ("requests", ())):
        page = body(oncall, name, *args)
        assert "onclick" not in page and "<script>" not in page
        assert page.count("<style") == 1
