"""The bytes of a key rotation are pinned, and its proof is bound to one agent and one key."""

import msgspec

from controlplane.wire.rekeying import Rekey, Rekeyed, proof_message

UUID = "01a227c5-9af1-7369-af9d-034add706e7c"


def test_the_bytes_of_both_messages():
    assert msgspec.json.encode(Rekey("a2V5", "cHJvb2Y=")) == b'{"public_key":"a2V5","proof":"cHJvb2Y="}'
    assert msgspec.json.encode(Rekeyed(7)) == b'{"until_us":7}'


def test_the_proof_names_the_agent_and_the_key():
    assert proof_message(UUID, b"k" * 32) == b"flexband agent key\n" + UUID.encode() + b"\n" + b"k" * 32
    assert len({proof_message(UUID, b"a" * 32), proof_message(UUID, b"b" * 32), proof_message("x", b"a" * 32)}) == 3
