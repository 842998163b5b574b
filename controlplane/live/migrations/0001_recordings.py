"""Recordings of the live pages: one table a grain, by day, so that what is over its time is dropped and never deleted."""

from django.db import migrations

TABLES = """
CREATE TABLE live_recording (
    grain smallint NOT NULL,
    topic text NOT NULL,
    started_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    body bytea NOT NULL
) PARTITION BY LIST (grain);
CREATE TABLE live_recording_second PARTITION OF live_recording FOR VALUES IN (1) PARTITION BY RANGE (started_at);
CREATE TABLE live_recording_minute PARTITION OF live_recording FOR VALUES IN (60) PARTITION BY RANGE (started_at);
CREATE INDEX live_recording_topic ON live_recording (topic, started_at);
"""
KEEP = """
CREATE FUNCTION live_keep_recordings(today date, second_days integer, minute_days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp SET lock_timeout = '5s' AS $$
DECLARE
    parent text;
    days integer;
    name text;
    day date;
    dropped integer := 0;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('live_keep_recordings'));
    FOREACH parent IN ARRAY ARRAY['live_recording_second', 'live_recording_minute'] LOOP
        days := CASE parent WHEN 'live_recording_second' THEN second_days ELSE minute_days END;
        FOR day IN SELECT today + ahead FROM generate_series(0, 2) AS ahead LOOP
            name := parent || '_' || to_char(day, 'YYYYMMDD');
            IF to_regclass(name) IS NULL THEN
                EXECUTE format(
                    'CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)',
                    name, parent, day::text || ' 00:00:00+00', (day + 1)::text || ' 00:00:00+00'
                );
            END IF;
        END LOOP;
        FOR name IN
            SELECT child.relname FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid
             WHERE inhparent = parent::regclass
               AND to_date(right(child.relname, 8), 'YYYYMMDD') < today - days
        LOOP
            EXECUTE format('DROP TABLE %I', name);
            dropped := dropped + 1;
        END LOOP;
    END LOOP;
    RETURN dropped;
END
$$;
"""


class Migration(migrations.Migration):
    dependencies = []
    operations = [
        migrations.RunSQL(TABLES, "DROP TABLE live_recording"),
        migrations.RunSQL(KEEP, "DROP FUNCTION live_keep_recordings(date, integer, integer)"),
    ]
