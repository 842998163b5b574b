"""Dropping recordings is the application's to do, not of every role that may read."""

from django.db import migrations

RESTRICT = """
DO $$ BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'app') THEN
        REVOKE EXECUTE ON FUNCTION live_keep_recordings(date, integer, integer) FROM PUBLIC;
        GRANT EXECUTE ON FUNCTION live_keep_recordings(date, integer, integer) TO app;
    END IF;
END $$;
"""
RELEASE = "GRANT EXECUTE ON FUNCTION live_keep_recordings(date, integer, integer) TO PUBLIC"


class Migration(migrations.Migration):
    dependencies = [("live", "0001_recordings")]
    operations = [migrations.RunSQL(RESTRICT, RELEASE)]
