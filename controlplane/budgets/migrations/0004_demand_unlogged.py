"""An agent's demand is rebuilt by its next report: no need to log it."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("budgets", "0003_agent_demand")]
    operations = [
        migrations.RunSQL("ALTER TABLE budgets_agentdemand SET UNLOGGED", "ALTER TABLE budgets_agentdemand SET LOGGED"),
    ]
