from django.contrib.postgres.indexes import GinIndex, OpClass
from django.contrib.postgres.operations import TrigramExtension
from django.db import migrations, models
from django.db.models.functions import Upper


class Migration(migrations.Migration):
    """PostgreSQL's own extension pg_trgm, which the database's owner may create, and what reads it."""

    dependencies = [
        ("audit", "0004_entries_of_a_request"),
    ]

    operations = [
        TrigramExtension(),
        migrations.AddIndex(
            model_name="auditentry",
            index=models.Index(fields=["noun", "action"], name="audit_entry_vocabulary"),
        ),
        migrations.AddIndex(
            model_name="auditentry",
            index=GinIndex(OpClass(Upper("actor_name"), name="gin_trgm_ops"), name="audit_entry_actor"),
        ),
    ]
