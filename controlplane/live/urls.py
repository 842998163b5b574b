"""Addresses of the live pages and the live socket."""

from django.urls import path

from controlplane.live import act_views, history, key_check_views, request_views, views
from controlplane.live.consumers import LiveConsumer

urlpatterns = [
    path("", views.home, name="home"),
    path("pools/<slug:slug>/", views.pool, name="pool"),
    path("pools/<slug:slug>/queue.csv", views.queue_csv, name="pool-queue-csv"),
    path("pools/<slug:slug>/stages.csv", views.stages_csv, name="pool-stages-csv"),
    path("keys/<slug:public_id>/check/", key_check_views.check, name="key-check"),
    path("live/frames/", history.frames, name="live-frames"),
    path("acts/<int:entry_id>/", act_views.act, name="act"),
    path("acts/drain/<int:agent_id>/", act_views.drain, name="act-drain"),
    path("acts/undrain/<int:agent_id>/", act_views.undrain, name="act-undrain"),
    path("acts/suspend/<slug:slug>/", act_views.suspend, name="act-suspend"),
    path("acts/resume/<slug:slug>/", act_views.resume, name="act-resume"),
    path("requests/", request_views.requests, name="requests"),
    path("requests/<uuid:request_id>/", request_views.request, name="request"),
]

websocket_urlpatterns = [path("ws/live/", LiveConsumer.as_asgi())]
