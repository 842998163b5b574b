from django.apps import AppConfig


class FlexConfig(AppConfig):
    name = "controlplane.flex"
    label = "flex"
    default_auto_field = "django.db.models.BigAutoField"
