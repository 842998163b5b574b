"""Addresses of the lab's pages."""

from django.urls import path

from controlplane.experiments import views

urlpatterns = [
    path("lab/", views.experiments, name="lab"),
    path("lab/new/", views.choose, name="lab-choose"),
    path("lab/new/<slug:kind>/", views.new, name="lab-new"),
    path("lab/compare/", views.compare, name="lab-compare"),
    path("lab/draft-effect/", views.draft_effect, name="draft-effect"),
    path("lab/shared/<str:token>/", views.shared, name="lab-shared"),
    path("lab/<int:pk>/", views.experiment, name="experiment"),
    path("lab/<int:pk>/verdict/", views.verdict, name="experiment-verdict"),
    path("lab/<int:pk>/rerun/", views.rerun, name="experiment-rerun"),
    path("lab/<int:pk>/cancel/", views.cancel, name="experiment-cancel"),
    path("lab/<int:pk>/share/", views.share, name="experiment-share"),
    path("lab/<int:pk>/safe-rate/", views.safe_rate, name="experiment-safe-rate"),
]
