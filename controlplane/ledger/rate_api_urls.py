"""REST addresses of rates, under /api/v1/."""

from controlplane.fleet.routing import Router
from controlplane.ledger.rate_api import CostRateViewSet, RateCardViewSet

router = Router()
router.register("cost-rates", CostRateViewSet, basename="api-cost-rates")
router.register("rate-cards", RateCardViewSet, basename="api-rate-cards")

urlpatterns = router.urls
