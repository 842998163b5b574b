"""Day partitions are made by a function of the owner, because the application's role may not change the schema."""

from django.db import migrations

CREATE = """
CREATE FUNCTION usage_create_partition(day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    name text := 'usage_record_' || to_char(day, 'YYYYMMDD');
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('usage_create_partition'));
    IF to_regclass(name) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format(
        'CREATE TABLE %I PARTITION OF usage_record FOR VALUES FROM (%L) TO (%L)',
        name, day::text || ' 00:00:00+00', (day + 1)::text || ' 00:00:00+00'
    );
    RETURN true;
END
$$;
"""


class Migration(migrations.Migration):
    dependencies = [("usage", "0002_partitioned_records")]
    operations = [migrations.RunSQL(CREATE, "DROP FUNCTION usage_create_partition(date)")]
