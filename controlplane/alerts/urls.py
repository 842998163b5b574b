"""Addresses of alerts, silences and receivers."""

from django.urls import path

from controlplane.alerts import views

urlpatterns = [
    path("alerts/", views.alerts, name="alerts"),
    path("alerts/<int:alert_id>/", views.alert, name="alert"),
    path("alerts/<int:alert_id>/acknowledge/", views.acknowledge, name="alert-acknowledge"),
    path("alerts/<int:alert_id>/rearm/", views.rearm, name="alert-rearm"),
    path("alerts/silences/", views.silences, name="silences"),
    path("alerts/silences/new/", views.silence_new, name="silence-new"),
    path("alerts/silences/<int:silence_id>/end/", views.silence_end, name="silence-end"),
    path("alerts/receivers/", views.receivers, name="receivers"),
    path("alerts/receivers/new/", views.receiver_new, name="receiver-new"),
    path("alerts/receivers/<int:receiver_id>/", views.receiver, name="receiver"),
    path("alerts/receivers/<int:receiver_id>/edit/", views.receiver_edit, name="receiver-edit"),
    path("alerts/receivers/<int:receiver_id>/rotate/", views.receiver_rotate, name="receiver-rotate"),
    path("alerts/receivers/<int:receiver_id>/secret/", views.receiver_secret, name="receiver-secret"),
    path("alerts/receivers/<int:receiver_id>/archive/", views.receiver_archive, name="receiver-archive"),
    path("alerts/receivers/<int:receiver_id>/test/", views.receiver_test, name="receiver-test"),
    path("alerts/deliveries/<int:delivery_id>/resend/", views.delivery_resend, name="delivery-resend"),
]
