"""The bytes of every message are pinned: agents and control planes of different releases talk to each other.

A change here changes the protocol. Write the new bytes with `python -m tests.wire.test_golden`, and say in the change
log what older agents make of it.
"""

from pathlib import Path

import msgspec
import pytest

from controlplane.wire import enrolment, lease, policy, report, signing
from tests.wire.messages import MESSAGES, USAGE_ROW

GOLDEN = Path(__file__).parent / "golden"
LIVE = {"live_key", "live_tenant", "live_class", "live_freeze"}


def encoded(name: str) -> bytes:
    """Documents that are signed are canonical; the rest is in the order of its fields."""
    message = MESSAGES[name]
    signed_forms = {"policy_document", "nudge", "live_nudge", *LIVE}
    return signing.canonical(message) if name in signed_forms else msgspec.json.encode(message)


@pytest.mark.parametrize("name", MESSAGES)
def test_the_bytes_are_those_of_the_golden_file(name):
    assert encoded(name) + b"\n" == (GOLDEN / f"{name}.json").read_bytes()


@pytest.mark.parametrize("name", MESSAGES)
def test_golden_bytes_are_read_as_the_message(name):
    kind = policy.LiveBody if name in LIVE else type(MESSAGES[name])
    assert msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes(), type=kind) == MESSAGES[name]


def test_every_message_has_a_golden_file_and_every_golden_file_a_message():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(MESSAGES)


def test_every_struct_of_the_wire_is_in_a_message():
    """A new message without a golden file is found here."""
    text = repr(MESSAGES)
    for module in (enrolment, report, policy):
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                assert f"{name}(" in text, f"{name} is in no golden message"


def test_an_unknown_field_is_passed_over_and_a_missing_one_gets_its_default():
    """What a newer release adds does not break an older one."""
    assert msgspec.json.decode(b'{"tenant_id":1,"need_nanos":2,"new":3}', type=lease.LeaseRequest).spends == []
    hello = msgspec.json.decode(b'{"software":"s","boot_id":"b"}', type=enrolment.Hello)
    assert hello.spooled_epochs == []


def test_a_row_is_an_array_in_the_order_of_its_fields():
    assert msgspec.json.decode(msgspec.json.encode(USAGE_ROW))[:4] == [USAGE_ROW.request_id, 1_001, 1_002, 3]
    assert len(msgspec.json.decode(msgspec.json.encode(USAGE_ROW))) == len(report.UsageRow.__struct_fields__)


if __name__ == "__main__":
    for each in MESSAGES:
        (GOLDEN / f"{each}.json").write_bytes(encoded(each) + b"\n")
