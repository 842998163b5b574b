"""REST addresses of pools, slots, agents and enrolment tokens, under /api/v1/."""

from controlplane.fleet.api import AgentViewSet, PoolViewSet, SlotViewSet, TokenViewSet
from controlplane.fleet.routing import Router

router = Router()
router.register("pools", PoolViewSet, basename="api-pools")
router.register("slots", SlotViewSet, basename="api-slots")
router.register("agents", AgentViewSet, basename="api-agents")
router.register("enrolment-tokens", TokenViewSet, basename="api-enrolment-tokens")

urlpatterns = router.urls
