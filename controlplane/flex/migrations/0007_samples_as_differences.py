"""A sample of a second in which nothing happened says what differs from the pool's last whole one.

Both columns are null in older rows: those are whole, and which of them is kept follows from its second.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("flex", "0006_room_for_ticks")]
    operations = [
        migrations.AddField("poolsample", "whole_at", models.DateTimeField(null=True)),
        migrations.AddField("poolsample", "kept", models.BooleanField(null=True)),
    ]
