"""REST addresses of policy, under /api/v1/."""

from django.urls import path
from rest_framework.routers import SimpleRouter

from controlplane.policy.api import DriftView, RevisionViewSet
from controlplane.policy.configuration_api import ApplyView, ConfigurationView, PlanView, SigningKeysView

router = SimpleRouter()
router.register("policy/revisions", RevisionViewSet, basename="policy-revisions")

urlpatterns = [
    path("policy/drift/", DriftView.as_view(), name="api-policy-drift"),
    path("policy/configuration/", ConfigurationView.as_view(), name="api-policy-configuration"),
    path("policy/configuration/plan/", PlanView.as_view(), name="api-policy-configuration-plan"),
    path("policy/configuration/apply/", ApplyView.as_view(), name="api-policy-configuration-apply"),
    path("policy/signing-keys/", SigningKeysView.as_view(), name="api-policy-signing-keys"),
    *router.urls,
]
