import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("budgets", "0009_increases_and_notices"),
    ]

    operations = [
        migrations.CreateModel(
            name="BudgetForecast",
            fields=[
                (
                    "budget",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE,
                        primary_key=True,
                        related_name="kept_forecast",
                        serialize=False,
                        to="budgets.budget",
                    ),
                ),
                ("ends_at", models.DateTimeField()),
                ("point_nanos", models.BigIntegerField(blank=True, null=True)),
                ("made_at", models.DateTimeField()),
            ],
        ),
    ]
