"""REST addresses of tenants, keys, people and the audit log, under /api/v1/."""

from rest_framework.routers import SimpleRouter

from controlplane.tenants.api import KeyViewSet, MemberViewSet, TenantViewSet
from controlplane.tenants.audit_api import AuditViewSet

router = SimpleRouter()
router.register("tenants", TenantViewSet, basename="api-tenants")
router.register("api-keys", KeyViewSet, basename="api-keys")
router.register("members", MemberViewSet, basename="api-members")
router.register("audit", AuditViewSet, basename="api-audit")

urlpatterns = router.urls
