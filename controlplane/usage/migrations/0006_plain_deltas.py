"""Sketches of deltas are stored as they are: they live for a minute, and compressing them cost more than all the rest."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("usage", "0005_imported_usage")]
    operations = [
        migrations.RunSQL(
            "ALTER TABLE usage_rollupdelta ALTER COLUMN stages SET STORAGE EXTERNAL",
            "ALTER TABLE usage_rollupdelta ALTER COLUMN stages SET STORAGE EXTENDED",
        )
    ]
