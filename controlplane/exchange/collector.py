"""The cycle collector of a process that takes reports: hundreds of small objects each, all freed without it."""

import gc

# Reports are trees, not cycles. With the usual 700 every report would start several collections for nothing, and
# every tenth of those would walk the objects of all reports in flight.
YOUNG_OBJECTS = 50_000
GENERATIONS = (YOUNG_OBJECTS, 20, 50)


def spare_reports() -> None:
    """Puts everything loaded so far out of the collector's sight and lets it run by the work of many reports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GENERATIONS)
