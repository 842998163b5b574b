"""Objects of the alerts' addresses for the matrix: each belongs to no tenant."""

from datetime import timedelta

from django.utils import timezone

from controlplane.alerts.delivering import tell_test
from controlplane.alerts.models import Alert, Delivery, Receiver, Silence
from tests import factories


def alert(owner: str) -> int:
    values = {
        "kind": "lost", "severity": "page", "grade": "unknown", "word": "Lost", "group": "pool:a", "title": "Lost",
        "raised_at": factories.NOW, "seen_at": factories.NOW,
    }  # fmt: skip
    return Alert.objects.get_or_create(key="lost-a", resolved_at=None, defaults=values)[0].pk


def silence(owner: str) -> int:
    values = {"starts_at": factories.NOW, "ends_at": timezone.now() + timedelta(days=1), "created_at": factories.NOW}
    return Silence.objects.get_or_create(pool="a", ended_at=None, defaults=values)[0].pk


def receiver(owner: str) -> int:
    values = {
        "kind": "webhook", "target": "https://example.com/hook", "created_at": factories.NOW,
        "updated_at": factories.NOW,
    }  # fmt: skip
    return Receiver.objects.get_or_create(name="pager", archived_at=None, defaults=values)[0].pk


def delivery(owner: str) -> int:
    row = Receiver.objects.get(pk=receiver(owner))
    found = Delivery.objects.filter(receiver=row).first() or tell_test(row, "ada", factories.NOW)
    return found.pk
