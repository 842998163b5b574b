"""Every number that agents or viewers compare moves above what may have been given out since the backup.

The statements run in the transaction that restores the database: nobody ever sees one without the other. They name what
they move; `core.generations` says how far and why.
"""

from __future__ import annotations

from django.apps import apps
from django.db.models import IntegerField

from controlplane.core.generations import live_floor, moved_by
from controlplane.policy.live_list import KINDS

_NUMBERS = """
UPDATE tenants_installation SET generation = {generation};

-- Every id and number that a sequence gives: revisions, leases, items' fences, decisions, and ids of rows, which
-- records that agents send again may name: one of a lost row must not come to mean another.
DO $$ DECLARE s record; BEGIN
    FOR s IN SELECT schemaname, sequencename, coalesce(last_value, 0) + {step} AS next, max_value
             FROM pg_sequences WHERE schemaname = 'public' AND increment_by = 1 AND max_value > {step} LOOP
        IF s.next > s.max_value THEN
            RAISE EXCEPTION 'the sequence % does not go on to %', s.sequencename, s.next;
        END IF;
        PERFORM setval(format('%I.%I', s.schemaname, s.sequencename), s.next);
    END LOOP;
END $$;

-- Fences: a slot's grant, what is open under it, and the newest interval, which fences go on from without a grant.
UPDATE flex_grant SET fence = fence + {step};
UPDATE flex_lend SET fence = fence + {step} WHERE home_at IS NULL;
UPDATE flex_trip SET fence = fence + {step} WHERE handled_at IS NULL;
UPDATE fleet_slotinterval SET fence = fence + {step}
WHERE id IN (SELECT max(id) FROM fleet_slotinterval GROUP BY slot_id);
-- Nobody leads, and whoever led is not taken for the one who does.
UPDATE flex_controllerterm SET term = term + {step}, expires_at = clock_timestamp();
"""

# Versions are what an edit is checked against (ETag, If-Match, forms): one that was read before must not fit by chance.
_VERSIONS = """
DO $$ DECLARE name text; BEGIN
    FOREACH name IN ARRAY ARRAY[{tables}] LOOP
        IF EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass(name) AND attname = 'version') THEN
            EXECUTE format('UPDATE %I SET version = version + {step}', name);
        END IF;
    END LOOP;
END $$;
"""

# All subjects get new numbers in their order, so that an agent's list of before is told from one of this generation.
_LIVE = """
CREATE TEMPORARY TABLE live_renumbered ON COMMIT DROP AS
SELECT kind, id, {floor} + row_number() OVER (ORDER BY live_number, kind, id) AS number FROM ({rows}) AS numbered;
{updates}
UPDATE tenants_installation SET live_number = {floor} + (SELECT count(*) FROM live_renumbered);
"""


def statements(*, saved: int, generation: int) -> str:
    """SQL that makes a database of a saved generation one of `generation`. Raises ValueError where that is no later."""
    step, floor = moved_by(saved, generation), live_floor(generation)
    tables = {kind.name: kind.rows().model._meta.db_table for kind in KINDS}
    rows = " UNION ALL ".join(
        f"SELECT '{kind}' AS kind, id, live_number FROM {table} WHERE live_number > 0"  # noqa: S608 - names are constants
        for kind, table in tables.items()
    )
    updates = "\n".join(
        f"UPDATE {table} AS t SET live_number = n.number FROM live_renumbered AS n WHERE n.kind = '{kind}' AND n.id = t.id;"  # noqa: S608, E501 - names are constants
        for kind, table in tables.items()
    )
    versioned = ", ".join(f"'{table}'" for table in versioned_tables())
    return "\n".join(
        (
            _NUMBERS.format(generation=generation, step=step),
            _VERSIONS.format(tables=versioned, step=step),
            _LIVE.format(floor=floor, rows=rows, updates=updates),
        )
    )


def versioned_tables() -> list[str]:
    """Tables whose rows count their edits in `version`."""
    return sorted(
        model._meta.db_table
        for model in apps.get_models()
        for field in model._meta.local_fields
        if field.name == "version" and type(field) is IntegerField and field.default == 1
    )
