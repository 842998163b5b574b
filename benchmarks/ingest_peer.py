"""The peer: what a Django project would write first, a DRF ModelSerializer(many=True) and one bulk_create.

No middleware, no authentication, persistent connections: nothing that would slow it down without need, and nothing
that a project would tune. Duplicates are left out by the primary key (`ignore_conflicts`). granian serves it.
"""

from __future__ import annotations

import os

import django
import environ
from django.conf import settings

if not settings.configured:
    database = environ.Env.db_url_config(os.environ["DATABASE_URL"].replace("postgresql://", "postgres://"))
    database |= {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": 600}
    settings.configure(
        SECRET_KEY="benchmark",
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=__name__,
        DATABASES={"default": database},
        INSTALLED_APPS=["rest_framework"],
        MIDDLEWARE=[],
        USE_TZ=True,
        DATA_UPLOAD_MAX_MEMORY_SIZE=None,
        REST_FRAMEWORK={
            "DEFAULT_AUTHENTICATION_CLASSES": [],
            "DEFAULT_PERMISSION_CLASSES": [],
            "UNAUTHENTICATED_USER": None,
        },
    )
    django.setup()

from django.core.wsgi import get_wsgi_application
from django.db import models
from django.urls import path
from rest_framework import serializers
from rest_framework.response import Response
from rest_framework.views import APIView

from benchmarks.ingest_columns import COLUMNS

TABLE = "benchmark_peer_record"
_FIELDS = {
    "uuid": models.UUIDField,
    "time": models.DateTimeField,
    "int8": models.BigIntegerField,
    "int4": models.IntegerField,
    "int2": models.SmallIntegerField,
    "text": models.TextField,
}


def _field(name: str, kind: str) -> models.Field:
    if name == "request_id":
        return models.UUIDField(primary_key=True)
    return _FIELDS[kind](**({"blank": True} if kind == "text" else {}))


_attributes = {name: _field(name, kind) for name, kind in COLUMNS}
_attributes |= {"__module__": __name__, "Meta": type("Meta", (), {"app_label": "peer", "db_table": TABLE})}
PeerRecord = type("PeerRecord", (models.Model,), _attributes)


class PeerSerializer(serializers.ModelSerializer):
    request_id = serializers.UUIDField()

    class Meta:
        model = PeerRecord
        fields = [name for name, _ in COLUMNS]


class Ingest(APIView):
    def post(self, request):
        serializer = PeerSerializer(data=request.data, many=True)
        serializer.is_valid(raise_exception=True)
        PeerRecord.objects.bulk_create([PeerRecord(**row) for row in serializer.validated_data], ignore_conflicts=True)
        return Response(status=204)


urlpatterns = [path("ingest", Ingest.as_view())]
application = get_wsgi_application()
