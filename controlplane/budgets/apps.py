from django.apps import AppConfig


class BudgetsConfig(AppConfig):
    name = "controlplane.budgets"
    label = "budgets"
    default_auto_field = "django.db.models.BigAutoField"
