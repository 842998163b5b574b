"""Where nudges travel on the broker: names and queue arguments that publisher and agents have to agree on.

A pool's agents share a fanout exchange; an agent binds an auto-delete queue of its own to it with `ROUTING_KEY`. On a
Redis-compatible broker a fanout's routing key and the key prefix are part of the channel's name, so a consumer that
leaves one of them out hears nothing.
"""

from typing import Any, Final

ROUTING_KEY: Final = "policy"
CONTENT_TYPE: Final = "application/json"
# The broker drops what nobody fetched in time; a nudge is worthless after the next report.
NUDGE_TTL_S: Final = 60
# How long a queue may be without a consumer before the broker deletes it.
QUEUE_EXPIRES_S: Final = 120
# What kombu has to be told on a Redis-compatible broker, on both sides.
REDIS_TRANSPORT_OPTIONS: Final[dict[str, Any]] = {"global_keyprefix": "fb:"}


def pool_exchange(pool_slug: str) -> str:
    """The fanout exchange of a pool."""
    return f"policy.{pool_slug}"


def agent_queue(agent_uuid: str) -> str:
    """The queue of one agent on the default exchange: what concerns it alone."""
    return f"agent.{agent_uuid}"


def broadcast_queue(agent_uuid: str) -> str:
    """The queue that one agent binds to its pool's exchange."""
    return f"policy.{agent_uuid}"
