"""Names of the demo fleet, known to the seeding process and to the supervisor, which never opens the database."""

from dataclasses import dataclass

BIG_POOL, SMALL_POOL = "chat-70b", "chat-8b"
BIG_MODEL, SMALL_MODEL = "llama-70b", "llama-8b"
CHAT, BULK = "chat", "bulk"
PLACES = 8
# Amortised work of a token on the simulated slots at their reference concurrency.
PREFILL_US, DECODE_US = 70, 4_100


@dataclass(frozen=True, slots=True)
class Bounds:
    """The longest prompt and answer that the traffic will bring, in tokens."""

    prompt_tokens: int
    output_tokens: int
