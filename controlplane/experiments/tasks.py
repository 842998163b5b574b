"""Doorbells of the lab: an experiment that waits is run; a lost or doubled message changes nothing."""

from celery import shared_task
from django.utils import timezone

from controlplane.experiments import inputs, running
from controlplane.wakeups.bells import ring


@shared_task(name="experiments.run", ignore_result=True)
def run(experiment_id: int) -> bool:
    """Runs one experiment and rings for the next."""
    done = running.run(experiment_id)
    if done:
        sweep()
    return done


@shared_task(name="experiments.sweep", ignore_result=True)
def sweep() -> int:
    """Rings for experiments whose message or worker was lost, or that found no room; returns how many."""
    found = running.waiting(timezone.now())
    for experiment_id in found:
        ring("experiments.run", experiment_id=experiment_id)
    return len(found)


@shared_task(name="experiments.end_inputs", ignore_result=True)
def end_inputs() -> int:
    """Ends inputs that are older than operators want and that nothing needs; returns how many files."""
    return inputs.end_old(timezone.now())
