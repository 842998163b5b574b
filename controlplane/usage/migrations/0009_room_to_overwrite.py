"""Room in the pages of the rows that every report overwrites.

In full pages a new version goes to another page and into every index, and the old ones pile up until a vacuum: under a
thousand agents reading one row passed a hundred dead ones. With room each page keeps and clears its own versions.
"""

from django.db import migrations

TABLES = ("usage_agentcursor", "fleet_agentlive", "budgets_agentdemand", "jobs_itemholder")


class Migration(migrations.Migration):
    dependencies = [
        ("usage", "0008_hello_mark"),
        ("fleet", "0001_initial"),
        ("budgets", "0003_agent_demand"),
        ("jobs", "0002_batch_items"),
    ]
    operations = [
        migrations.RunSQL(
            [f"ALTER TABLE {table} SET (fillfactor = 20)" for table in TABLES],
            [f"ALTER TABLE {table} RESET (fillfactor)" for table in TABLES],
        )
    ]
