"""Deltas are written by each transaction of reports and read by their minute: the index over their ids served nothing
but their removal, which names them by where they are.
"""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("usage", "0011_charges_of_a_tenant_by_day")]
    operations = [
        migrations.RunSQL(
            "ALTER TABLE usage_rollupdelta DROP CONSTRAINT usage_rollupdelta_pkey",
            "ALTER TABLE usage_rollupdelta ADD PRIMARY KEY (id)",
        )
    ]
