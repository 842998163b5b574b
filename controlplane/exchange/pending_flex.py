"""Temporary: until flex brings these names. Remove."""

try:
    from controlplane.flex.ingest import note_slots, note_trips
    from controlplane.flex.queries import grants_for
except ImportError:

    def note_slots(cursor, rows, now): ...
    def note_trips(cursor, rows, now): ...
    def grants_for(cursor, agent_ids):
        return {}
