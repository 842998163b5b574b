"""The database itself refuses to change or remove rows of inputs and answers of experiments, whoever asks."""

from django.db import migrations

TABLES = ["experiments_inputfile", "experiments_experimentresult"]
REFUSE = """
CREATE OR REPLACE FUNCTION flexband_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only: % is refused', TG_TABLE_NAME, TG_OP USING ERRCODE = 'restrict_violation';
END $$;
"""
PROTECT = """
CREATE TRIGGER append_only_row BEFORE UPDATE OR DELETE ON {table}
    FOR EACH ROW EXECUTE FUNCTION flexband_append_only();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION flexband_append_only();
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'app') THEN
        REVOKE UPDATE, DELETE, TRUNCATE ON {table} FROM app;
    END IF;
END $$;
"""
RELEASE = "DROP TRIGGER append_only_row ON {table}; DROP TRIGGER append_only_truncate ON {table};"


class Migration(migrations.Migration):
    dependencies = [("experiments", "0001_initial")]
    operations = [
        migrations.RunSQL(REFUSE, migrations.RunSQL.noop),
        *(migrations.RunSQL(PROTECT.format(table=table), RELEASE.format(table=table)) for table in TABLES),
    ]
