"""What a thousand samples a second need not pay for.

The index by pool and instant finds a pool's rows too; one by pool alone only cost at each write. And a writer takes a
thousand numbers of samples at once, which leaves gaps where it ends.
"""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("flex", "0008_evidence_by_lz4")]
    operations = [
        migrations.AlterField(
            model_name="poolsample",
            name="pool",
            field=models.ForeignKey(
                db_constraint=False,
                db_index=False,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="+",
                to="fleet.pool",
            ),
        ),
        migrations.AlterField(
            model_name="decision",
            name="pool",
            field=models.ForeignKey(
                db_index=False, on_delete=django.db.models.deletion.PROTECT, related_name="+", to="fleet.pool"
            ),
        ),
        migrations.RunSQL(
            "ALTER SEQUENCE flex_poolsample_id_seq CACHE 1000", "ALTER SEQUENCE flex_poolsample_id_seq CACHE 1"
        ),
    ]
