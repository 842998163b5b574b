"""REST addresses of budgets, under /api/v1/."""

from rest_framework.routers import SimpleRouter

from controlplane.budgets.api import BudgetViewSet

router = SimpleRouter()
router.register("budgets", BudgetViewSet, basename="api-budgets")

urlpatterns = router.urls
