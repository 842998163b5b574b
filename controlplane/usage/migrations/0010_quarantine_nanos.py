"""What was set aside says what it was charged: an alert compares it with the spend."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("usage", "0009_room_to_overwrite")]
    operations = [
        migrations.AddField("quarantine", "nanos", models.BigIntegerField(null=True, blank=True)),
    ]
