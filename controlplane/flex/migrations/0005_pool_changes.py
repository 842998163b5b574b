"""What changed of a pool since the controller read it last, noted by the database itself, whoever writes.

The leader keeps its pools in memory and reads again only those that stand here. A trigger sees every writer: pages,
REST, ingest, workers and a person at the database's prompt. While nobody leads, and nobody has led for a minute,
nothing is noted: whoever leads next reads everything.
"""

from django.db import migrations, models

NOTE = """
CREATE FUNCTION flex_note_change() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    jobs_only boolean := coalesce(TG_ARGV[1] = 'jobs', FALSE);
    said record;
BEGIN
    IF NOT EXISTS (
        SELECT FROM flex_controllerterm WHERE expires_at > clock_timestamp() - interval '1 minute'
    ) THEN
        RETURN NULL;
    END IF;
    IF TG_OP = 'DELETE' THEN said := OLD; ELSE said := NEW; END IF;
    CASE TG_ARGV[0]
    WHEN 'pool_id' THEN
        INSERT INTO flex_poolchange (pool_id, jobs_only) VALUES (said.pool_id, jobs_only);
        IF TG_OP = 'UPDATE' AND OLD.pool_id <> NEW.pool_id THEN
            INSERT INTO flex_poolchange (pool_id, jobs_only) VALUES (OLD.pool_id, jobs_only);
        END IF;
    WHEN 'id' THEN
        INSERT INTO flex_poolchange (pool_id, jobs_only) VALUES (said.id, FALSE);
    WHEN 'slot_id' THEN
        INSERT INTO flex_poolchange (pool_id, jobs_only) SELECT pool_id, FALSE FROM fleet_slot WHERE id = said.slot_id;
    WHEN 'revision_id' THEN
        INSERT INTO flex_poolchange (pool_id, jobs_only)
        SELECT pool_id, FALSE FROM policy_policybundle WHERE revision_id = said.revision_id;
    WHEN 'rollout_id' THEN
        INSERT INTO flex_poolchange (pool_id, jobs_only)
        SELECT b.pool_id, FALSE FROM policy_rollout r JOIN policy_policybundle b USING (revision_id)
        WHERE r.id = said.rollout_id;
    ELSE
        INSERT INTO flex_poolchange (pool_id, jobs_only) SELECT id, FALSE FROM fleet_pool;
    END CASE;
    RETURN NULL;
END $$;
"""

#: (table, events, condition, how its rows name their pool); a condition of "" is none.
TRIGGERS = (
    ("fleet_pool", "INSERT OR UPDATE OR DELETE", "", "'id'"),
    ("fleet_agent", "INSERT OR UPDATE OF pool_id, state, drain_requested_at, uuid OR DELETE", "", "'pool_id'"),
    ("fleet_slot", "INSERT OR UPDATE OR DELETE", "", "'pool_id'"),
    ("fleet_slottenure", "INSERT OR UPDATE OR DELETE", "", "'slot_id'"),
    ("fleet_slotinterval", "INSERT OR UPDATE OR DELETE", "", "'slot_id'"),
    ("flex_grant", "INSERT OR DELETE", "", "'slot_id'"),
    (
        "flex_grant",
        "UPDATE",
        "(OLD.fence, OLD.state, OLD.manual_recall) IS DISTINCT FROM (NEW.fence, NEW.state, NEW.manual_recall)",
        "'slot_id'",
    ),
    ("flex_trip", "INSERT OR UPDATE OR DELETE", "", "'slot_id'"),
    ("flex_lend", "INSERT OR UPDATE OF lent_at OR DELETE", "", "'pool_id'"),
    ("jobs_job", "INSERT OR DELETE", "", "'pool_id', 'jobs'"),
    (
        "jobs_job",
        "UPDATE",
        "(OLD.pool_id, OLD.state, OLD.deadline, OLD.items, OLD.items_completed, OLD.items_parked, OLD.items_cancelled,"
        " OLD.gpu_us_done, OLD.prompt_tokens, OLD.expected_output_tokens, OLD.tenant_id, OLD.admission)"
        " IS DISTINCT FROM"
        " (NEW.pool_id, NEW.state, NEW.deadline, NEW.items, NEW.items_completed, NEW.items_parked,"
        " NEW.items_cancelled, NEW.gpu_us_done, NEW.prompt_tokens, NEW.expected_output_tokens, NEW.tenant_id,"
        " NEW.admission)",
        "'pool_id', 'jobs'",
    ),
    ("jobs_batchefficiency", "INSERT OR UPDATE OR DELETE", "", "'pool_id'"),
    ("policy_policybundle", "INSERT OR UPDATE OF signature OR DELETE", "", "'pool_id'"),
    ("policy_rollout", "INSERT OR DELETE", "", "'revision_id'"),
    ("policy_wave", "INSERT OR UPDATE OF state OR DELETE", "", "'rollout_id'"),
    ("contracts_workloadclass", "INSERT OR UPDATE OR DELETE", "", "'all'"),
    ("tenants_installation", "INSERT OR UPDATE OF billing_zone OR DELETE", "", "'all'"),
)


def name_of(events: str) -> str:
    """Two triggers of one table differ by their first event."""
    return f"flex_notes_{events.split()[0].lower()}"


def created(table: str, events: str, condition: str, arguments: str) -> str:
    when = f" WHEN ({condition})" if condition else ""
    return (
        f"CREATE TRIGGER {name_of(events)} AFTER {events} ON {table} FOR EACH ROW{when}"
        f" EXECUTE FUNCTION flex_note_change({arguments})"
    )


class Migration(migrations.Migration):
    dependencies = [
        ("contracts", "0001_initial"),
        ("fleet", "0005_pool_batching"),
        ("flex", "0004_measured_drain"),
        ("jobs", "0007_job_admission"),
        ("policy", "0004_gates_and_watch"),
        ("tenants", "0003_key_expiry"),
    ]
    operations = [
        migrations.CreateModel(
            name="PoolChange",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("pool_id", models.BigIntegerField()),
                ("jobs_only", models.BooleanField(default=False)),
            ],
        ),
        migrations.RunSQL(NOTE, "DROP FUNCTION flex_note_change()"),
        *(
            migrations.RunSQL(
                created(table, events, condition, arguments), f"DROP TRIGGER {name_of(events)} ON {table}"
            )
            for table, events, condition, arguments in TRIGGERS
        ),
        migrations.AddIndex(
            model_name="trip",
            index=models.Index(fields=["slot"], condition=models.Q(handled_at=None), name="flex_trip_unhandled"),
        ),
    ]
