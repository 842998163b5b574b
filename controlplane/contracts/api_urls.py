"""REST addresses of classes and contracts, under /api/v1/."""

from controlplane.contracts.api import ClassViewSet, ContractViewSet
from controlplane.fleet.routing import Router

router = Router()
router.register("classes", ClassViewSet, basename="api-classes")
router.register("contracts", ContractViewSet, basename="api-contracts")

urlpatterns = router.urls
