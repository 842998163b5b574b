"""Classes' priorities as engines with few levels take them.

A class's priority is a number of which a lower one is served earlier, as vLLM counts. Triton has levels: 1 is the
highest and the last the lowest, and 0 asks for the model's default.
"""

from collections.abc import Iterable


def priority_levels(priorities: Iterable[int]) -> dict[int, int]:
    """Level by priority: distinct priorities in order, the lowest number (served first) at level 1."""
    return {priority: level for level, priority in enumerate(sorted(set(priorities)), 1)}
