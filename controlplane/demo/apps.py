from django.apps import AppConfig


class DemoConfig(AppConfig):
    name = "controlplane.demo"
    label = "demo"
    default_auto_field = "django.db.models.BigAutoField"
