from django.apps import AppConfig


class OperationsConfig(AppConfig):
    name = "controlplane.operations"
    label = "operations"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from controlplane.operations import checks  # noqa: F401 - registers itself; needs the app registry
