"""Settings, URLs, ASGI and the Celery app."""

from controlplane.config.celery import app as celery_app

__all__ = ["celery_app"]
