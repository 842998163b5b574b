"""Inputs may be read by a worker, are marked as evidence, and end by one function of the database, by nothing else."""

from django.db import migrations, models

END = """
CREATE FUNCTION experiments_inputs_end_here() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('flexband.ending_inputs', true) = 'yes' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END $$;
DROP TRIGGER append_only_row ON experiments_inputfile;
CREATE TRIGGER append_only_row BEFORE UPDATE OR DELETE ON experiments_inputfile
    FOR EACH ROW EXECUTE FUNCTION experiments_inputs_end_here();

CREATE FUNCTION experiments_end_inputs(ended_before timestamptz, most integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
DECLARE
    ended integer;
BEGIN
    IF ended_before > now() - interval '7 days' + interval '1 minute' THEN
        RAISE EXCEPTION 'inputs of experiments are kept for 7 days or longer';
    END IF;
    PERFORM pg_advisory_xact_lock(1818321513);
    PERFORM set_config('flexband.ending_inputs', 'yes', true);
    DELETE FROM experiments_inputfile WHERE sha256 IN (
        SELECT f.sha256 FROM experiments_inputfile f
        WHERE f.created_at < ended_before AND f.sha256 NOT IN (
            SELECT i.value FROM experiments_experiment e, jsonb_each_text(e.inputs) i
            WHERE e.ended_at IS NULL OR e.ended_at >= ended_before OR e.share_token IS NOT NULL OR e.evidence
                OR (e.draft_digest <> '' AND EXISTS (SELECT FROM policy_revision r WHERE r.digest = e.draft_digest))
        ) ORDER BY f.created_at LIMIT most
    );
    GET DIAGNOSTICS ended = ROW_COUNT;
    PERFORM set_config('flexband.ending_inputs', '', true);
    RETURN ended;
END $$;
"""
KEEP = """
DROP FUNCTION experiments_end_inputs(timestamptz, integer);
DROP TRIGGER append_only_row ON experiments_inputfile;
DROP FUNCTION experiments_inputs_end_here();
CREATE TRIGGER append_only_row BEFORE UPDATE OR DELETE ON experiments_inputfile
    FOR EACH ROW EXECUTE FUNCTION flexband_append_only();
"""


class Migration(migrations.Migration):
    dependencies = [("experiments", "0002_append_only"), ("policy", "0001_initial")]
    operations = [
        migrations.AddField("experiment", "prepared", models.BooleanField(default=True, db_default=True)),
        migrations.AddField("experiment", "evidence", models.BooleanField(default=False, db_default=False)),
        migrations.RunSQL(END, KEEP),
    ]
