"""A tick writes a sample of every pool and renews every loan: what that costs beside the rows themselves.

Samples name their pool without a foreign key: pools are never removed, and each row's check read and locked the row of
its pool at the commit. Grants get room in their pages, as other rows have that are overwritten each second.
"""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("flex", "0005_pool_changes")]
    operations = [
        migrations.AlterField(
            model_name="poolsample",
            name="pool",
            field=models.ForeignKey(
                db_constraint=False,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="+",
                to="fleet.pool",
            ),
        ),
        migrations.RunSQL(
            "ALTER TABLE flex_grant SET (fillfactor = 20)",
            "ALTER TABLE flex_grant RESET (fillfactor)",
        ),
    ]
