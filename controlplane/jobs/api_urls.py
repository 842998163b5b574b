"""REST addresses of jobs, under /api/v1/."""

from controlplane.fleet.routing import Router
from controlplane.jobs.api import JobViewSet

router = Router()
router.register("jobs", JobViewSet, basename="api-jobs")

urlpatterns = router.urls
