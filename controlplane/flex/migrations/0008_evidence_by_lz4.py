"""Evidence is compressed by LZ4, where the server was built with it: a tenth of the pools may decide in one second, and
the method that PostgreSQL takes by default costs more than all else of writing their rows.
"""

from django.db import migrations

COLUMNS = (("flex_decision", "snapshot"), ("flex_decision", "checks"), ("flex_poolsample", "figures"),
           ("fleet_agentlive", "figures"))  # fmt: skip


def compressed(table: str, column: str) -> str:
    return (
        f"DO $$ BEGIN ALTER TABLE {table} ALTER COLUMN {column} SET COMPRESSION lz4;"
        " EXCEPTION WHEN feature_not_supported THEN NULL; END $$"
    )


class Migration(migrations.Migration):
    dependencies = [("flex", "0007_samples_as_differences"), ("fleet", "0006_band_report")]
    operations = [
        migrations.RunSQL(
            compressed(table, column), f"ALTER TABLE {table} ALTER COLUMN {column} SET COMPRESSION default"
        )
        for table, column in COLUMNS
    ]
