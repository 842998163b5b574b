"""Divisions of limits that every process answers from; rebuilt within a second, so no need to log them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("budgets", "0005_lease_outage")]
    operations = [
        migrations.CreateModel(
            name="ShareDivision",
            fields=[
                ("number", models.BigAutoField(primary_key=True, serialize=False)),
                ("at", models.DateTimeField(db_index=True)),
                ("body", models.JSONField()),
            ],
        ),
        migrations.RunSQL(
            "ALTER TABLE budgets_sharedivision SET UNLOGGED", "ALTER TABLE budgets_sharedivision SET LOGGED"
        ),
        migrations.AddField("agentdemand", "told", models.BigIntegerField(db_default=0, default=0)),
        migrations.AddField("agentdemand", "acked", models.BigIntegerField(db_default=0, default=0)),
    ]
