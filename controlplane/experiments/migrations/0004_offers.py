"""Another kind of question: which offers of capacity meet what was measured."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("experiments", "0003_prepared_later_and_inputs_end")]

    operations = [
        migrations.AlterField(
            model_name="experiment",
            name="kind",
            field=models.CharField(
                choices=[
                    ("interference", "Whether to buy"),
                    ("replay", "Replay"),
                    ("overload", "Overload"),
                    ("designs", "Isolation designs"),
                    ("capacity", "Capacity"),
                    ("batching", "Batch sizes"),
                    ("effect", "Effect of a draft"),
                    ("offers", "Capacity offers"),
                ],
                max_length=12,
            ),
        ),
    ]
