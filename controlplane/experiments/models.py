"""Experiments of the lab: what was asked of which inputs, how far it is, and the answer, which is only ever added."""

from django.db import models
from django.db.models import Q


class InputFile(models.Model):
    """Bytes that an experiment was made of, by their digest, once for equal ones; `inputs.end_old` ends old ones."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    content = models.BinaryField()
    size = models.PositiveBigIntegerField()
    created_at = models.DateTimeField()


class Experiment(models.Model):
    """One question. `arguments` and `inputs` (file name -> sha256) are all that its answer depends on.

    Until it is `prepared` they are what a worker makes them from. `evidence`: somebody acted on its answer.
    """

    class Kind(models.TextChoices):
        INTERFERENCE = "interference", "Whether to buy"
        REPLAY = "replay", "Replay"
        OVERLOAD = "overload", "Overload"
        DESIGNS = "designs", "Isolation designs"
        CAPACITY = "capacity", "Capacity"
        BATCHING = "batching", "Batch sizes"
        EFFECT = "effect", "Effect of a draft"
        OFFERS = "offers", "Capacity offers"

    class State(models.TextChoices):
        WAITING = "waiting", "Waiting"
        RUNNING = "running", "Running"
        DONE = "done", "Done"
        FAILED = "failed", "Failed"
        CANCELLED = "cancelled", "Cancelled"

    AT_WORK = (State.WAITING, State.RUNNING)

    kind = models.CharField(max_length=12, choices=Kind)
    title = models.CharField(max_length=120)
    parameters = models.JSONField()
    arguments = models.JSONField()
    inputs = models.JSONField(default=dict)
    seed = models.BigIntegerField()
    source = models.CharField(max_length=300, blank=True, default="")
    pool = models.CharField(max_length=63, blank=True, default="")
    draft_digest = models.CharField(max_length=64, blank=True, default="")
    prepared = models.BooleanField(default=True, db_default=True)
    evidence = models.BooleanField(default=False, db_default=False)
    state = models.CharField(max_length=9, choices=State, default=State.WAITING)
    progress = models.FloatField(default=0.0)
    runs = models.PositiveIntegerField(default=0)
    problem = models.CharField(max_length=400, blank=True, default="")
    rerun_of = models.ForeignKey("self", null=True, on_delete=models.PROTECT, related_name="reruns")
    share_token = models.CharField(max_length=43, null=True, unique=True)
    created_at = models.DateTimeField()
    created_by = models.CharField(max_length=150)
    started_at = models.DateTimeField(null=True)
    seen_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)

    class Meta:
        indexes = [
            models.Index(
                fields=["state", "id"], name="experiment_at_work", condition=Q(state__in=("waiting", "running"))
            ),
            models.Index(fields=["draft_digest", "-id"], name="experiment_of_draft", condition=~Q(draft_digest="")),
            models.Index(fields=["pool", "-id"], name="experiment_of_pool", condition=~Q(pool="")),
        ]  # fmt: skip

    @property
    def at_work(self) -> bool:
        return self.state in self.AT_WORK


class ExperimentResult(models.Model):
    """The answer as bytes of canonical JSON. Rows are only ever added."""

    experiment = models.OneToOneField(Experiment, on_delete=models.PROTECT, related_name="result")
    content = models.BinaryField()
    sha256 = models.CharField(max_length=64)
    code_version = models.CharField(max_length=80)
    seconds = models.FloatField()
    created_at = models.DateTimeField()
