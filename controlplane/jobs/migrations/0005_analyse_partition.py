"""Statistics of a day's items after an import: the owner's tables are analysed by a function of the owner."""

from django.db import migrations

CREATE = """
CREATE FUNCTION jobs_analyse_partition(day date) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $$
BEGIN
    EXECUTE format(
        'ANALYZE %I, %I', 'jobs_item_' || to_char(day, 'YYYYMMDD'), 'jobs_itembody_' || to_char(day, 'YYYYMMDD')
    );
END
$$;
"""


class Migration(migrations.Migration):
    dependencies = [("jobs", "0004_batch_progress")]
    operations = [migrations.RunSQL(CREATE, "DROP FUNCTION jobs_analyse_partition(date)")]
