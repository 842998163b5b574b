"""Policy as Triton's config.pbtxt: what the blocks say, that they are well formed, and who gets them."""

import msgspec
import pytest
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policy.actions import push
from controlplane.policy.triton import config_blocks, quoted
from controlplane.wire.policy import Batching, SlotPolicy
from tests.policy.text_format import parse
from tests.wire.messages import DOCUMENT

CHAT = msgspec.structs.replace(
    DOCUMENT.classes[0], slug="chat", priority=10, max_queue=64, max_wait_ms=2_000, overload="reject"
)
BULK = msgspec.structs.replace(
    CHAT, id=2, slug="bulk", kind="batch", priority=100, max_queue=256, max_wait_ms=600_000, overload="queue"
)
BANDS = ("interactive", "interactive", "batch", "flex", "flex", "flex")


def document(*, classes=(CHAT, BULK), bands=BANDS, size: int = 32, wait_ms: int = 5, **pool):
    slots = [SlotPolicy(n, f"s{n}", band, 4, 1000, 7 + n % 2) for n, band in enumerate(bands)]
    changed = msgspec.structs.replace(DOCUMENT.pool, slots=slots, batching=Batching(size, wait_ms), **pool)
    return msgspec.structs.replace(DOCUMENT, pool=changed, classes=list(classes))


def blocks(doc, **more):
    return parse(config_blocks(doc, revision=42, **more))


def test_instances_are_the_slots_by_band_and_share_one_resource() -> None:
    found = blocks(document())
    groups = {group["name"]: group for group in found["instance_group"]}
    assert {name: group["count"] for name, group in groups.items()} == {
        "chat-70b-interactive": 2, "chat-70b-flex": 3, "chat-70b-batch": 1,
    }  # fmt: skip
    for group in groups.values():
        assert group["kind"] == "KIND_GPU"
        assert group["rate_limiter"]["resources"] == [{"name": "flexband-chat-70b", "global": True, "count": 1}]
    text = config_blocks(document(), revision=42)
    assert "--rate-limit=execution_count --rate-limit-resource=flexband-chat-70b:6" in text


def test_the_floor_of_batch_gets_fewer_chances() -> None:
    groups = {group["name"]: group["rate_limiter"]["priority"] for group in blocks(document())["instance_group"]}
    assert groups == {"chat-70b-interactive": 1, "chat-70b-flex": 1, "chat-70b-batch": 2}


def test_batches_close_by_size_or_wait() -> None:
    found = blocks(document())
    assert found["max_batch_size"] == 32
    assert found["dynamic_batching"]["preferred_batch_size"] == [32]
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 5_000


def test_without_batching_nothing_waits() -> None:
    found = blocks(document(size=1, wait_ms=0))
    assert found["max_batch_size"] == 1
    assert "preferred_batch_size" not in found["dynamic_batching"]
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 0


def test_priority_level_1_is_the_class_that_is_served_first() -> None:
    text = config_blocks(document(), revision=42)
    batching = parse(text)["dynamic_batching"]
    assert (batching["priority_levels"], batching["default_priority_level"]) == (2, 2)
    assert "level 1 is the highest, a larger level is served later" in text
    assert "1 = chat, 2 = bulk" in text
    policies = {entry["key"]: entry["value"] for entry in batching["priority_queue_policy"]}
    assert policies == {
        1: {
            "timeout_action": "REJECT", "default_timeout_microseconds": 2_000_000, "allow_timeout_override": False,
            "max_queue_size": 64,
        },
        2: {
            "timeout_action": "DELAY", "default_timeout_microseconds": 600_000_000, "allow_timeout_override": False,
            "max_queue_size": 256,
        },
    }  # fmt: skip
    assert batching["default_queue_policy"] == policies[2], "who names no priority goes last"


def test_classes_of_one_priority_share_a_level_with_the_wider_limits() -> None:
    other = msgspec.structs.replace(CHAT, id=3, slug="vip", max_queue=8, max_wait_ms=9_000)
    (level, _) = blocks(document(classes=(CHAT, other, BULK)))["dynamic_batching"]["priority_queue_policy"]
    assert (level["value"]["max_queue_size"], level["value"]["default_timeout_microseconds"]) == (64, 9_000_000)


def test_a_queue_of_none_is_not_written_as_no_limit() -> None:
    closed = msgspec.structs.replace(CHAT, max_queue=0)
    (only,) = blocks(document(classes=(closed,)))["dynamic_batching"]["priority_queue_policy"]
    assert only["value"]["max_queue_size"] == 1


def test_one_agents_server_runs_its_slots_only() -> None:
    found = blocks(document(), agent_id=7)
    assert {group["name"]: group["count"] for group in found["instance_group"]} == {
        "chat-70b-interactive": 1, "chat-70b-flex": 1, "chat-70b-batch": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no slots on that agent"):
        config_blocks(document(), revision=1, agent_id=99)


@given(
    st.lists(st.sampled_from(["interactive", "batch", "flex"]), min_size=1, max_size=20),
    st.lists(st.integers(0, 10_000), max_size=5),
    st.integers(1, 1024),
    st.text(st.characters(blacklist_categories=["Cs"]), max_size=30),
)
def test_any_policy_makes_well_formed_blocks(bands, priorities, size, model) -> None:
    classes = [msgspec.structs.replace(CHAT, id=n, slug=f"c{n}", priority=p) for n, p in enumerate(priorities)]
    found = blocks(document(bands=bands, classes=classes, size=size, model=model))
    assert sum(group["count"] for group in found["instance_group"]) == len(bands)
    levels = [entry["key"] for entry in found["dynamic_batching"].get("priority_queue_policy", [])]
    assert levels == list(range(1, len(set(priorities)) + 1))


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_strings_survive_being_written(text: str) -> None:
    assert parse(f"name: {quoted(text)}")["name"] == text


@pytest.mark.parametrize(
    "wrong",
    [
        "unknown: 1",
        "name: 1",
        "name: chat",
        "max_batch_size: [ 1 ]",
        'name: "a" name: "b"',
        "instance_group [ { ]",
        "}",
    ],
)
def test_the_reader_refuses_what_triton_would(wrong: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse(wrong)


# Who gets them


@pytest.fixture
def pushed(fleet, actor):
    fleet.pool.max_batch_size, fleet.pool.max_batch_wait_ms = 16, 8
    fleet.pool.save(update_fields=["max_batch_size", "max_batch_wait_ms"])
    return push(actor=actor, reason="with batching", now=timezone.now())


@pytest.mark.django_db
@pytest.mark.usefixtures("no_broker")
def test_the_revisions_page_offers_the_file_and_rest_gives_the_same(people, fleet, pushed):
    page = people["viewer"].get(f"/policy/revisions/{pushed.number}/").content.decode()
    path = f"/policy/revisions/{pushed.number}/triton/chat-70b/"
    assert f'href="{path}"' in page
    file = people["viewer"].get(path)
    assert (file.status_code, file["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert file["Content-Disposition"] == f'attachment; filename="chat-70b-r{pushed.number}.config.pbtxt"'
    found = parse(file.content.decode())
    assert found["max_batch_size"] == 16 and len(found["instance_group"]) == 3
    rest = people["viewer"].get(f"/api/v1/policy/revisions/{pushed.number}/triton/chat-70b/")
    assert rest.content == file.content
    one = people["viewer"].get(f"{path}?agent={fleet.agents[0].pk}")
    assert sum(group["count"] for group in parse(one.content.decode())["instance_group"]) == 4


@pytest.mark.django_db
@pytest.mark.usefixtures("no_broker")
def test_what_is_not_there_is_not_found(people, pushed):
    base = f"/policy/revisions/{pushed.number}/triton"
    for path in (
        f"{base}/nobody/",
        f"{base}/chat-70b/?agent=99999",
        f"{base}/chat-70b/?agent=x",
        f"{base}/chat-70b/?agent=-1",
    ):
        for prefix in ("", "/api/v1"):
            assert people["admin"].get(prefix + path).status_code == 404, prefix + path
    assert people["tenant"].get(f"{base}/chat-70b/").status_code == 403
    assert people["tenant"].get(f"/api/v1{base}/chat-70b/").status_code == 403
