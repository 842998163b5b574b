"""Evidence stays the text that it is written as: to take it apart and put it together again (`jsonb`) was more than half of
what the database did for a decision, and each is read seldom, if ever. Tables are written anew once.
"""

from django.db import migrations

import controlplane.flex.models

COLUMNS = (("flex_decision", "snapshot"), ("flex_decision", "checks"), ("flex_poolsample", "figures"))


def compressed(table: str, column: str) -> str:
    """Another type has the method of compression that is set for all."""
    return (
        f"DO $$ BEGIN ALTER TABLE {table} ALTER COLUMN {column} SET COMPRESSION lz4;"
        " EXCEPTION WHEN feature_not_supported THEN NULL; END $$"
    )


class Migration(migrations.Migration):
    dependencies = [("flex", "0010_old_samples_are_found")]
    operations = [
        migrations.AlterField("decision", "snapshot", controlplane.flex.models.Evidence()),
        migrations.AlterField("decision", "checks", controlplane.flex.models.Evidence()),
        migrations.AlterField("poolsample", "figures", controlplane.flex.models.Evidence(default=dict)),
        *(migrations.RunSQL(compressed(table, column), compressed(table, column)) for table, column in COLUMNS),
    ]
