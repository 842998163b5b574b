from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0002_live_unlogged")]
    operations = [
        migrations.AddField("slot", "removed_at", models.DateTimeField(blank=True, null=True)),
    ]
