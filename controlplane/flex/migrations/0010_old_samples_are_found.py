"""Old samples are removed each second by their instant.

What an index of ranges does not know of yet is read each time: with each range noted when it is full that is the newest
one, not a fifth of the table.
"""

import django.contrib.postgres.indexes
from django.db import migrations

NAME = "flex_poolsample_at_brin"


class Migration(migrations.Migration):
    dependencies = [("flex", "0009_one_index_by_pool")]
    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    f"ALTER INDEX {NAME} SET (autosummarize = on)", f"ALTER INDEX {NAME} RESET (autosummarize)"
                )
            ],
            state_operations=[
                migrations.RemoveIndex(model_name="poolsample", name=NAME),
                migrations.AddIndex(
                    model_name="poolsample",
                    index=django.contrib.postgres.indexes.BrinIndex(autosummarize=True, fields=["at"], name=NAME),
                ),
            ],
        )
    ]
