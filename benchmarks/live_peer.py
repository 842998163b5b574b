"""The peer of `benchmarks.live`: the same door and the same frames, told to viewers by Channels' `group_send`.

BENCHMARK_LAYER names the channel layer: `core` (the usual one) or `pubsub`.
"""

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django

django.setup()

import orjson  # noqa: E402 - needs the app registry
from channels.auth import AuthMiddlewareStack  # noqa: E402 - needs the app registry
from channels.generic.websocket import AsyncWebsocketConsumer  # noqa: E402 - needs the app registry
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402 - needs the app registry
from channels.security.websocket import AllowedHostsOriginValidator  # noqa: E402 - needs the app registry
from django.conf import settings  # noqa: E402 - needs the app registry
from django.urls import path  # noqa: E402 - needs the app registry

LAYERS = {
    "core": "channels_redis.core.RedisChannelLayer",
    "pubsub": "channels_redis.pubsub.RedisPubSubChannelLayer",
}


def layer_settings(name: str) -> dict:
    """`CHANNEL_LAYERS` for a layer of this name."""
    return {"default": {"BACKEND": LAYERS[name], "CONFIG": {"hosts": [settings.REDIS_URL], "prefix": f"peer-{name}"}}}


settings.CHANNEL_LAYERS = layer_settings(os.environ.get("BENCHMARK_LAYER", "core"))


def group_of(topic: str) -> str:
    """Groups may not have a colon in their name."""
    return topic.replace(":", ".")


class GroupConsumer(AsyncWebsocketConsumer):
    """Each topic is a group; each frame comes as a message of its own."""

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        for topic in orjson.loads(text_data or "")["subscribe"]:
            await self.channel_layer.group_add(group_of(topic), self.channel_name)
        await self.send(text_data="{}")

    async def frame(self, event: dict) -> None:
        await self.send(text_data=event["text"])


application = ProtocolTypeRouter(
    {
        "websocket": AllowedHostsOriginValidator(
            AuthMiddlewareStack(URLRouter([path("ws/live/", GroupConsumer.as_asgi())]))
        )
    }
)
