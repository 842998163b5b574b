"""The last report of each agent is rebuilt by the next one: no need to log it."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("fleet", "0001_initial")]
    operations = [
        migrations.RunSQL("ALTER TABLE fleet_agentlive SET UNLOGGED", "ALTER TABLE fleet_agentlive SET LOGGED"),
    ]
