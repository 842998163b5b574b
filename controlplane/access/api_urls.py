"""REST addresses of how people get in, under /api/v1/."""

from rest_framework.routers import SimpleRouter

from controlplane.access.api import FactorsViewSet, InvitationViewSet, SessionViewSet, TokenViewSet

router = SimpleRouter()
router.trailing_slash = "/?"  # a program's POST must not be lost to a redirect
router.register("sessions", SessionViewSet, basename="api-sessions")
router.register("invitations", InvitationViewSet, basename="api-invitations")
router.register("personal-tokens", TokenViewSet, basename="api-personal-tokens")
router.register("second-factors", FactorsViewSet, basename="api-second-factors")

urlpatterns = router.urls
