"""The peer's web side: one Django view that serves a bundle from its row, one that acknowledges by update_or_create.

No middleware, no authentication, no signature of the request, persistent database connections.
"""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.config.settings")

import django
from django.conf import settings

settings.ROOT_URLCONF = __name__
settings.DATABASES["default"]["CONN_MAX_AGE"] = 600
django.setup()
# After the applications looked for theirs: the peer's own requests pass none.
settings.MIDDLEWARE = []

from django.core.wsgi import get_wsgi_application  # noqa: E402 - needs the app registry
from django.http import HttpResponse  # noqa: E402
from django.urls import path  # noqa: E402
from django.utils import timezone  # noqa: E402
from django.views.decorators.csrf import csrf_exempt  # noqa: E402

from controlplane.policy.models import Delivery, PolicyBundle  # noqa: E402


def bundle(request, digest):
    return _sized(bytes(PolicyBundle.objects.get(digest=digest).body))


@csrf_exempt
def acknowledge(request, rollout_id, agent_id):
    Delivery.objects.update_or_create(
        rollout_id=rollout_id, agent_id=agent_id, defaults={"state": "acked", "answered_at": timezone.now()}
    )
    return _sized(b"ok")


def _sized(body):
    return HttpResponse(body, content_type="application/json", headers={"Content-Length": str(len(body))})


urlpatterns = [
    path("bundle/<str:digest>", bundle),
    path("ack/<int:rollout_id>/<int:agent_id>", acknowledge),
]
application = get_wsgi_application()
