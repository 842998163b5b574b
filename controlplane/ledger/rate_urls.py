"""Pages of rates."""

from django.urls import path

from controlplane.ledger import rate_views

urlpatterns = [
    path("rates/", rate_views.rate_list, name="rates"),
    path("rates/cost/<slug:slug>/new/", rate_views.cost_rate_new, name="cost-rate-new"),
    path("rates/cards/<slug:class_slug>/<int:model_id>/new/", rate_views.rate_card_new, name="rate-card-new"),
]
