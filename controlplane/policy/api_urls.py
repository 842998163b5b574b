"""REST addresses of policy, under /api/v1/."""

from django.urls import path
from rest_framework.routers import SimpleRouter

from controlplane.policy.api import DriftView, RevisionViewSet

router = SimpleRouter()
router.register("policy/revisions", RevisionViewSet, basename="policy-revisions")

urlpatterns = [path("policy/drift/", DriftView.as_view(), name="api-policy-drift"), *router.urls]
