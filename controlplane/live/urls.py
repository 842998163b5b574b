"""Addresses of the live pages and the live socket."""

from django.urls import path

from controlplane.live import history, request_views, views
from controlplane.live.consumers import LiveConsumer

urlpatterns = [
    path("", views.home, name="home"),
    path("pools/<slug:slug>/", views.pool, name="pool"),
    path("pools/<slug:slug>/queue.csv", views.queue_csv, name="pool-queue-csv"),
    path("pools/<slug:slug>/stages.csv", views.stages_csv, name="pool-stages-csv"),
    path("live/frames/", history.frames, name="live-frames"),
    path("requests/", request_views.requests, name="requests"),
    path("requests/<uuid:request_id>/", request_views.request, name="request"),
]

websocket_urlpatterns = [path("ws/live/", LiveConsumer.as_asgi())]
