from django.contrib.postgres.indexes import GinIndex, OpClass
from django.db import migrations
from django.db.models.functions import Upper


class Migration(migrations.Migration):
    dependencies = [
        ("audit", "0005_search"),
        ("tenants", "0003_key_expiry"),
    ]

    operations = [
        migrations.AddIndex(
            model_name="apikey",
            index=GinIndex(
                OpClass(Upper("name"), name="gin_trgm_ops"),
                OpClass(Upper("public_id"), name="gin_trgm_ops"),
                OpClass(Upper("prefix"), name="gin_trgm_ops"),
                name="key_text",
            ),
        ),
    ]
