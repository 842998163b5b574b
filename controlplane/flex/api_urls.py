"""REST addresses of the flex band, under /api/v1/."""

from rest_framework.routers import SimpleRouter

from controlplane.flex.api import DecisionViewSet, FlexPoolViewSet, FlexSlotViewSet, LoanViewSet

router = SimpleRouter()
router.register("flex/decisions", DecisionViewSet, basename="flex-decisions")
router.register("flex/loans", LoanViewSet, basename="flex-loans")
router.register("flex/slots", FlexSlotViewSet, basename="flex-slots")
router.register("flex/pools", FlexPoolViewSet, basename="flex-pools")

urlpatterns = router.urls
