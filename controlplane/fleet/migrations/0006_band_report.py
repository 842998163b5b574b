"""What the controller reads of every report each second, beside the report as JSON."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("fleet", "0005_pool_batching")]
    operations = [
        migrations.AddField("agentlive", "band", models.BinaryField(null=True)),
        migrations.AddField("agentlive", "band_epoch", models.IntegerField(null=True)),
        migrations.AddField("agentlive", "band_seq", models.BigIntegerField(null=True)),
    ]
