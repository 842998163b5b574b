"""The audit of copies, and days that left for Parquet; a day is dropped by a function of the owner that checks first."""

from django.db import migrations, models

DROP = """
CREATE FUNCTION usage_drop_partition(day_wanted date) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    name text := 'usage_record_' || to_char(day_wanted, 'YYYYMMDD');
    stored bigint;
    due bigint;
BEGIN
    IF to_regclass(name) IS NULL THEN
        RETURN 0;
    END IF;
    SELECT records INTO due FROM usage_retiredday WHERE day = day_wanted AND verified_at IS NOT NULL;
    IF due IS NULL THEN
        RAISE EXCEPTION 'the records of % have no verified file', day_wanted;
    END IF;
    EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', name);
    EXECUTE format('SELECT count(*) FROM %I', name) INTO stored;
    IF stored <> due THEN
        RAISE EXCEPTION 'the file of % has % records, the table %', day_wanted, due, stored;
    END IF;
    EXECUTE format('DROP TABLE %I', name);
    RETURN stored;
END
$$;
"""


class Migration(migrations.Migration):
    dependencies = [("usage", "0006_plain_deltas")]
    operations = [
        migrations.CreateModel(
            name="AuditedHour",
            fields=[
                ("hour", models.DateTimeField(primary_key=True, serialize=False)),
                ("records", models.BigIntegerField()),
                ("duplicates", models.IntegerField()),
                ("audited_at", models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name="RetiredDay",
            fields=[
                ("day", models.DateField(primary_key=True, serialize=False)),
                ("path", models.CharField(max_length=400)),
                ("records", models.BigIntegerField()),
                ("file_bytes", models.BigIntegerField()),
                ("table_bytes", models.BigIntegerField()),
                ("file_digest", models.BinaryField(max_length=32)),
                ("content_digest", models.BinaryField(max_length=32)),
                ("verified_at", models.DateTimeField()),
                ("dropped_at", models.DateTimeField(blank=True, null=True)),
            ],
        ),
        migrations.CreateModel(
            name="DuplicateRecord",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("request_id", models.UUIDField()),
                ("attempt", models.SmallIntegerField()),
                ("hour", models.DateTimeField(db_index=True)),
                ("found_at", models.DateTimeField()),
                ("copies", models.IntegerField()),
                ("agent_ids", models.JSONField()),
                ("same_content", models.BooleanField()),
                ("first_received_at", models.DateTimeField()),
                ("ended_at", models.DateTimeField()),
                ("pool_id", models.IntegerField()),
                ("tenant_id", models.IntegerField()),
                ("class_id", models.IntegerField()),
                ("model_id", models.IntegerField()),
                ("rate_version", models.IntegerField()),
                ("outcome", models.SmallIntegerField()),
                ("prompt_tokens", models.BigIntegerField()),
                ("cached_tokens", models.BigIntegerField()),
                ("output_tokens", models.BigIntegerField()),
                ("gpu_us", models.BigIntegerField()),
                ("charge_prompt_nanos", models.BigIntegerField()),
                ("charge_cached_nanos", models.BigIntegerField()),
                ("charge_output_nanos", models.BigIntegerField()),
                ("charge_gpu_nanos", models.BigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("request_id", "attempt"), name="one_duplicate_per_attempt")
                ],
            },
        ),
        migrations.RunSQL(DROP, "DROP FUNCTION usage_drop_partition(date)"),
    ]
