"""Slices of hard budgets that are leased in advance, for tenants that go on while the control plane is away."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("budgets", "0004_demand_unlogged")]
    operations = [
        migrations.AddField(
            model_name="lease",
            name="outage",
            field=models.BooleanField(db_default=False, default=False),
        ),
    ]
