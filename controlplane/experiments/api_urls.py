"""REST addresses of the lab, under /api/v1/."""

from rest_framework.routers import SimpleRouter

from controlplane.experiments.api import ExperimentViewSet

router = SimpleRouter()
router.trailing_slash = "/?"  # a program's POST must not be lost to a redirect
router.register("lab/experiments", ExperimentViewSet, basename="api-experiments")

urlpatterns = router.urls
