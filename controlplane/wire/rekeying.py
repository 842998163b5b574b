"""How an agent changes its key: the new one is posted, signed by the old, with a proof that the sender has it."""

from msgspec import Struct


class Rekey(Struct, frozen=True):
    """`public_key` is base64url of 32 bytes (Ed25519); `proof` is the new key's signature of `proof_message`."""

    public_key: str
    proof: str


class Rekeyed(Struct, frozen=True):
    """The key is known. Both are good until the first report signed by the new one, at most until `until_us`."""

    until_us: int


def proof_message(agent: str, public_key: bytes) -> bytes:
    """What the new key signs: a key that nobody holds, or that belongs to another agent, cannot be posted."""
    return b"flexband agent key\n" + agent.encode() + b"\n" + public_key
