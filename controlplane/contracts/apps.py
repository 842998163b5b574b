from django.apps import AppConfig


class ContractsConfig(AppConfig):
    name = "controlplane.contracts"
    label = "contracts"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Tells the fleet, which lies below, how to ask for classes and contracts."""
        # models cannot be imported before the registry of apps is ready
        from controlplane.contracts import queries
        from controlplane.fleet import served_classes

        served_classes.provide(classes=queries.served_classes, room_warnings=queries.room_warnings)
