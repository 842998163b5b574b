"""Objects of the lab's addresses for the matrix: each belongs to no tenant."""

import json

from controlplane.experiments.models import Experiment, ExperimentResult
from tests import factories

EXPERIMENT_ANSWER = {
    "note": "simulated", "seed": 1, "bands": ["interactive"], "service": "constants",
    "objective": {"ttft_ms": 700, "target": 0.99}, "safe_rates": {"1": 2.0}, "stages": {},
    "evidence": {
        "interactive_met": None, "batch_met": None, "forecast_rate_per_s": 1.0, "safe_rate_one_failed_per_s": None,
    },
    "verdict": "unknown", "reasons": ["not_tested"],
}  # fmt: skip


def experiment(owner: str) -> int:
    """An interference test that is done, with a link."""
    row, made = Experiment.objects.get_or_create(
        title="example",
        defaults={
            "kind": "interference", "parameters": {}, "arguments": [], "seed": 1, "state": "done",
            "share_token": "example-token", "created_at": factories.NOW, "created_by": "ada",
        },
    )  # fmt: skip
    if made:
        ExperimentResult.objects.create(
            experiment=row, content=json.dumps(EXPERIMENT_ANSWER).encode(), sha256="0" * 64, code_version="0" * 16,
            seconds=1.0, created_at=factories.NOW,
        )  # fmt: skip
    return row.pk


def share_token(owner: str) -> str:
    experiment(owner)
    return "example-token"


def experiment_kind(owner: str) -> str:
    return "batching"
