from django.apps import AppConfig


class PolicyConfig(AppConfig):
    name = "controlplane.policy"
    label = "policy"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Tells the fleet, which lies below, how to ask which revision an agent should apply."""
        # models cannot be imported before the registry of apps is ready
        from controlplane.fleet import desired
        from controlplane.policy import queries

        desired.provide(queries.desired_revisions)
