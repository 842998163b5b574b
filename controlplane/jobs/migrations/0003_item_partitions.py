"""Items, their bodies and their results: partitioned by the UTC day of their job, made and dropped by the owner.

The application's role may not change the schema, so both are functions of the owner. A day is dropped only when every
job of it has been purged: that is checked inside, under the lock that makes days.
"""

from django.db import migrations

CREATE = """
CREATE SEQUENCE jobs_item_fence AS bigint CACHE 1;
CREATE TABLE jobs_item (
    day date NOT NULL,
    job_id bigint NOT NULL,
    line integer NOT NULL,
    prompt_tokens integer NOT NULL,
    fence bigint NOT NULL DEFAULT 0,
    lease_expires timestamptz,
    agent_id integer,
    epoch integer,
    state smallint NOT NULL DEFAULT 0,
    attempt smallint NOT NULL DEFAULT 1,
    failures smallint NOT NULL DEFAULT 0,
    reason text NOT NULL DEFAULT '',
    PRIMARY KEY (day, job_id, line),
    CONSTRAINT jobs_item_state_known CHECK (state BETWEEN 0 AND 4),
    CONSTRAINT jobs_item_lease_whole CHECK (
        (state = 1) = (agent_id IS NOT NULL AND epoch IS NOT NULL AND lease_expires IS NOT NULL)
    )
) PARTITION BY RANGE (day);
CREATE INDEX jobs_item_waiting ON jobs_item (job_id, line) WHERE state = 0;
CREATE INDEX jobs_item_leased ON jobs_item (agent_id, fence) WHERE state = 1;
CREATE INDEX jobs_item_parked ON jobs_item (job_id, line) WHERE state = 3;
CREATE TABLE jobs_itembody (
    day date NOT NULL,
    job_id bigint NOT NULL,
    line integer NOT NULL,
    custom_id text NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (day, job_id, line)
) PARTITION BY RANGE (day);
CREATE TABLE jobs_itemresult (
    day date NOT NULL,
    job_id bigint NOT NULL,
    line integer NOT NULL,
    agent_id integer NOT NULL,
    finished_at timestamptz NOT NULL,
    request_id uuid NOT NULL,
    attempt smallint NOT NULL,
    outcome smallint NOT NULL,
    status smallint NOT NULL,
    response bytea NOT NULL,
    PRIMARY KEY (day, job_id, line)
) PARTITION BY RANGE (day);

CREATE FUNCTION jobs_create_partition(day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    parent text;
    suffix text := '_' || to_char(day, 'YYYYMMDD');
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('jobs_create_partition'));
    IF to_regclass('jobs_item' || suffix) IS NOT NULL THEN
        RETURN false;
    END IF;
    FOREACH parent IN ARRAY ARRAY['jobs_item', 'jobs_itembody', 'jobs_itemresult'] LOOP
        EXECUTE format(
            'CREATE TABLE %I PARTITION OF %I FOR VALUES FROM (%L) TO (%L)', parent || suffix, parent, day, day + 1
        );
    END LOOP;
    -- every item is written three times in a few hours: what it leaves behind must not wait for a fifth of the table
    EXECUTE format(
        'ALTER TABLE %I SET (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0, fillfactor = 90)',
        'jobs_item' || suffix
    );
    RETURN true;
END
$$;

CREATE FUNCTION jobs_drop_partition(day date) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    parent text;
    suffix text := '_' || to_char(day, 'YYYYMMDD');
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('jobs_create_partition'));
    IF to_regclass('jobs_item' || suffix) IS NULL
       OR EXISTS (SELECT 1 FROM jobs_job j WHERE j.day = jobs_drop_partition.day AND j.rows_purged_at IS NULL)
       OR day >= (now() AT TIME ZONE 'UTC')::date THEN
        RETURN false;
    END IF;
    FOREACH parent IN ARRAY ARRAY['jobs_item', 'jobs_itembody', 'jobs_itemresult'] LOOP
        EXECUTE format('DROP TABLE %I', parent || suffix);
    END LOOP;
    RETURN true;
END
$$;
"""
DROP = """
DROP FUNCTION jobs_drop_partition(date);
DROP FUNCTION jobs_create_partition(date);
DROP TABLE jobs_itemresult;
DROP TABLE jobs_itembody;
DROP TABLE jobs_item;
DROP SEQUENCE jobs_item_fence;
"""


class Migration(migrations.Migration):
    dependencies = [("jobs", "0002_batch_items")]
    operations = [migrations.RunSQL(CREATE, DROP)]
