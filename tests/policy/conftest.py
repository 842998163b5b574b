"""A small fleet that may be pushed, signing keys in a directory of the test's own, and light kombu consumers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
from celery import current_app
from django.conf import settings as django_settings
from kombu import Connection, Consumer, Exchange, Queue, pools

from controlplane.audit.actors import Actor
from controlplane.embedded.ports import free_port
from controlplane.ledger.models import RateCard
from controlplane.tenants.models import ApiKey
from controlplane.wire.nudging import (
    QUEUE_EXPIRES_S,
    REDIS_TRANSPORT_OPTIONS,
    ROUTING_KEY,
    agent_queue,
    broadcast_queue,
    pool_exchange,
)
from controlplane.wire.policy import Nudge, SignedNudge
from controlplane.wire.signing import from_text
from tests import factories

RABBITMQ_URL = "amqp://guest:guest@127.0.0.1:5672//"
ADMIN = Actor(id=None, name="ada", role="admin")


@pytest.fixture(autouse=True)
def signing_keys(settings, tmp_path):
    settings.SIGNING_KEY_DIR = tmp_path / "keys"
    # Signing in is not what these tests are about, and a slow hash for eight people each time is.
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return settings.SIGNING_KEY_DIR


@pytest.fixture
def actor() -> Actor:
    return ADMIN


@pytest.fixture
def no_broker(monkeypatch):
    """Doorbells and nudges meet a port where nobody listens."""
    with use_broker(f"redis://127.0.0.1:{free_port()}/0"):
        yield


@dataclass
class Fleet:
    pool: object
    agents: list
    classes: list
    tenant: object
    cards: list = field(default_factory=list)


def make_fleet(agents: int = 2, slug: str = "chat-70b", model: str = "llama-70b") -> Fleet:
    factories.installation()
    chat, bulk = classes()
    pool = factories.pool(slug, model=model)
    rows = [factories.agent(pool, f"{slug}-{number:03d}") for number in range(agents)]
    bands = ["interactive"] * 4 + ["batch"] * 2 + ["flex"] * 2
    for number, band in enumerate(bands):
        factories.slot(pool, f"s{number}", band, agent=rows[number % agents] if agents else None)
    cards = [
        RateCard.objects.create(
            class_slug=row.slug, model=pool.model, effective_from=factories.NOW.replace(year=2026, month=1),
            prompt_nanos_per_mtok=500_000_000, cached_nanos_per_mtok=250_000_000, output_nanos_per_mtok=1_500_000_000,
            created_at=factories.NOW, created_by="test",
        )
        for row in (chat, bulk)
    ]  # fmt: skip
    tenant = factories.Tenant.objects.filter(slug="acme").first() or factories.tenant("acme")
    return Fleet(pool, rows, [chat, bulk], tenant, cards)


def classes():
    rows = {row.slug: row for row in factories.WorkloadClass.objects.filter(slug__in=["chat", "bulk"])}
    chat = rows.get("chat") or factories.workload_class("chat")
    bulk = rows.get("bulk") or factories.workload_class("bulk", "batch")
    return chat, bulk


@pytest.fixture
def fleet(db) -> Fleet:
    return make_fleet()


def api_key(tenant, number: int = 1, **values) -> ApiKey:
    defaults = {
        "public_id": f"key{number:06d}", "name": f"key {number}", "prefix": "fb_test", "secret_hash": f"{number:064x}",
        "classes": ["chat"], "default_class": "chat", "created_at": factories.NOW,
    }  # fmt: skip
    return ApiKey.objects.create(tenant=tenant, **{**defaults, **values})


def rabbitmq_reachable() -> bool:
    try:
        with Connection(RABBITMQ_URL, connect_timeout=2) as connection:
            connection.connect()
    except OSError:
        return False
    return True


@contextmanager
def use_broker(url: str) -> Iterator[str]:
    """Points the one Celery application at another broker for a while."""
    app = current_app._get_current_object()
    before = (
        app.conf.broker_url,
        app.conf.broker_read_url,
        app.conf.broker_write_url,
        app.conf.broker_transport_options,
    )
    redis = url.startswith("redis")
    app.conf.broker_url = app.conf.broker_read_url = app.conf.broker_write_url = url
    app.conf.broker_transport_options = dict(before[3]) if redis else {}
    was_redis = django_settings.CELERY_BROKER_IS_REDIS
    django_settings.CELERY_BROKER_IS_REDIS = redis
    _forget_pools(app)
    try:
        yield url
    finally:
        if url == RABBITMQ_URL:
            _drop_doorbells(app.conf.task_default_queue)
        (
            app.conf.broker_url,
            app.conf.broker_read_url,
            app.conf.broker_write_url,
            app.conf.broker_transport_options,
        ) = before
        django_settings.CELERY_BROKER_IS_REDIS = was_redis
        _forget_pools(app)


def _drop_doorbells(queue: str) -> None:
    """Rings of these tests must not wait on a shared broker for a worker that comes later."""
    with Connection(RABBITMQ_URL) as connection:
        connection.channel().queue_delete(queue)


def _forget_pools(app) -> None:
    pools.reset()
    app._pool = None
    app.amqp._producer_pool = None


BROKERS = [
    pytest.param("redis", id="valkey"),
    pytest.param("rabbitmq", id="rabbitmq", marks=pytest.mark.rabbitmq),
]


@pytest.fixture(params=BROKERS)
def broker(request) -> Iterator[str]:
    """Each broker in turn; without a reachable RabbitMQ its half is skipped, loudly."""
    if request.param == "rabbitmq" and not rabbitmq_reachable():
        pytest.skip("NO RABBITMQ at 127.0.0.1:5672: half of the broker tests did not run")
    url = RABBITMQ_URL if request.param == "rabbitmq" else django_settings.REDIS_URL
    with use_broker(url) as used:
        yield used


class Listeners:
    """Light kombu consumers, as agents have them, all in one thread: what each of them heard."""

    def __init__(self, url: str, pool: str, uuids: list[str]) -> None:
        self.heard: dict[str, list[bytes]] = {uuid: [] for uuid in uuids}
        self._url, self._pool = url, pool
        self._stop, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        options = REDIS_TRANSPORT_OPTIONS if self._url.startswith("redis") else {}
        with Connection(self._url, transport_options=options) as connection:
            exchange = Exchange(pool_exchange(self._pool), type="fanout", durable=False)
            consumers = []
            for uuid in self.heard:
                channel = connection.channel()
                queues = [
                    Queue(broadcast_queue(uuid), exchange, routing_key=ROUTING_KEY, auto_delete=True, exclusive=True),
                    Queue(agent_queue(uuid), expires=QUEUE_EXPIRES_S),
                ]
                consumer = Consumer(
                    channel,
                    queues,
                    no_ack=True,
                    accept=None,
                    on_message=lambda message, uuid=uuid: self._take(uuid, message),
                )
                consumer.consume()
                consumers.append(consumer)
            self._ready.set()
            while not self._stop.is_set():
                try:
                    connection.drain_events(timeout=0.05)
                except TimeoutError:
                    continue

    def _take(self, uuid: str, message) -> None:
        body = message.body
        self.heard[uuid].append(body if isinstance(body, bytes) else body.encode())

    def nudges(self, uuid: str) -> list[Nudge]:
        return [read_nudge(body)[1] for body in list(self.heard[uuid])]

    def __enter__(self) -> "Listeners":
        self._thread.start()
        assert self._ready.wait(60)
        # A subscription on a Redis-compatible broker is sent with the first drain.
        time.sleep(0.3)
        return self

    def __exit__(self, *error) -> None:
        self._stop.set()
        self._thread.join(60)


def read_nudge(body: bytes) -> tuple[SignedNudge, Nudge]:
    signed = msgspec.json.decode(body, type=SignedNudge)
    return signed, msgspec.json.decode(from_text(signed.body), type=Nudge)


def wait_for(true: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)
