"""Forms of experiments, one a kind, with defaults that give an answer. REST asks through the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from controlplane.audit.forms import ReasonForm
from controlplane.experiments.models import Experiment
from controlplane.fleet.models import Pool, Slot
from controlplane.lab.arguments import read_changes, read_safe_rate
from controlplane.lab.faults import read_failure

FILE_BYTES_MAX = 4 << 20
SEED_MAX = 2**31 - 1
SOURCES = (
    ("usage", "What a pool served"),
    ("code", "Synthetic: code completion"),
    ("conversation", "Synthetic: conversations"),
    ("file", "A trace file"),
)
SERVICES = (
    ("fitted", "Fitted to the pool's records"),
    ("h100", "Measured tables, H100"),
    ("a100", "Measured tables, A100"),
    ("constants", "Constants below"),
)
POLICIES = (
    ("reserved", "Reserved, with a flex band"),
    ("dedicated", "Dedicated"),
    ("shared", "Shared"),
    ("fifo", "First come, first served (reference)"),
    ("priority", "Priority (reference)"),
)


def whole(label: str, initial: int | None, low: int, high: int, hint: str = "", *, required: bool = True) -> Any:
    return forms.IntegerField(
        label=label, initial=initial, min_value=low, max_value=high, help_text=hint, required=required
    )


def number(label: str, initial: float, low: float, high: float, hint: str = "", *, required: bool = True) -> Any:
    return forms.FloatField(
        label=label, initial=initial, min_value=low, max_value=high, help_text=hint, required=required
    )


def pool_choices() -> list[tuple[str, str]]:
    slugs = Pool.objects.filter(archived_at__isnull=True).order_by("slug").values_list("slug", flat=True)
    return [(slug, slug) for slug in slugs]


class ExperimentForm(forms.Form):
    """What every kind has."""

    first_group = "Traffic"
    """What the page calls the fields that it begins with."""
    title = forms.CharField(label="Title", max_length=120, help_text="What you want to know")
    seed = whole("Seed", 42, 0, SEED_MAX, "The same seed and inputs give the same answer, byte for byte")

    def values(self, now: datetime) -> dict[str, Any]:
        """Cleaned values as JSON types; an empty end of the window is now. Call on a valid form only."""
        found = {name: value for name, value in self.cleaned_data.items() if name not in ("title", "file")}
        if "until" in found:
            until = found["until"] or now
            found["until"] = until.astimezone(UTC).replace(microsecond=0).isoformat()
        return found


class WindowMixin(forms.Form):
    """A pool and a window of its usage."""

    pool = forms.ChoiceField(label="Pool", required=False)
    until = forms.DateTimeField(
        label="Until, UTC", required=False, help_text="End of the window, such as 2026-11-30 09:00. Empty: now",
        widget=forms.TextInput,
    )  # fmt: skip
    minutes = number("Length, min", 60, 0.1, 10_080, "Of the window")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        none = [] if self.fields["pool"].required else [("", "None")]
        self.fields["pool"].choices = [*none, *pool_choices()]  # type: ignore[attr-defined]


class LoadForm(WindowMixin):
    """Where requests come from."""

    source = forms.ChoiceField(label="Traffic", choices=SOURCES, initial="code")
    minutes = number("Length, min", 60, 0.1, 10_080, "Of the window, or of synthetic traffic")
    rate_per_s = number("Rate of synthetic traffic, requests/s", 2, 0.01, 1_000)
    file = forms.FileField(
        label="Trace file", required=False,
        help_text="Azure, BurstGPT or FOCUS CSV, Mooncake or own JSON lines, or ServeGen's client windows, of which the"
        " length above is read; at most 4 MB",
    )  # fmt: skip
    tenants = whole("Tenants", 8, 1, 1_000, "Drawn with Zipf shares where the trace names none")
    batch_items = whole("Items of a synthetic batch job", 0, 0, 20_000, "0: no job besides recorded ones")
    deadline_h = forms.FloatField(
        label="Deadline of the job, h", required=False, initial=8, min_value=0.01, max_value=720,
        help_text="After the start. Empty: best effort, so there is no deadline to miss",
    )  # fmt: skip
    slots = whole("Slots", 8, 1, 512)
    per_slot = whole("Requests that a slot runs at once", 16, 1, 1_024)
    kv_tokens = whole("KV memory of a slot, tokens", 0, 0, 100_000_000, "0: no bound")
    floor_interactive = whole("Interactive floor, slots", 4, 0, 512)
    floor_batch = whole("Batch floor, slots", 2, 0, 512, "What is in neither floor is the flex band")
    service_model = forms.ChoiceField(label="How long a request takes", choices=SERVICES, initial="h100")
    base_ms = number("Constant: base, ms", 50, 0, 60_000)
    prompt_us = whole("Constant: for each prompt token, µs", 125, 0, 1_000_000)
    output_us = whole("Constant: for each output token, µs", 30_000, 0, 10_000_000)
    objective_ms = number("Objective: time to first token, ms", 1_500, 1, 600_000)

    def clean(self) -> dict[str, Any]:
        found = super().clean() or self.cleaned_data
        if found.get("source") == "usage" and not found.get("pool"):
            self.add_error("pool", "Choose a pool whose usage is replayed.")
        file = found.get("file")
        if file is not None and file.size > FILE_BYTES_MAX:
            self.add_error("file", "The file has more than 4 MB: cut it, or replay it with manage.py lab.")
        floors = (found.get("floor_interactive") or 0) + (found.get("floor_batch") or 0)
        if "slots" in found and floors > found["slots"]:
            self.add_error("floor_batch", f"The floors need {floors} slots, there are {found['slots']}.")
        if found.get("source") == "file":
            found["file_name"] = "" if file is None else file.name[:100]
        return found


class TestForm(LoadForm, ExperimentForm):
    """Kinds that ask whether an objective is kept, and whether batch meets its deadline beside it."""

    batch_items = whole("Items of a synthetic batch job", 200, 0, 20_000, "0: no job, so the verdict stays unknown")
    target_percent = number("Target, % of offered requests", 95, 1, 99.999, "That must begin to answer in time")
    quality_percent = number("Quality guard, %", 1, 0, 100, "Truncated, failed or downgraded at most, in every stage")
    forecast = number("Forecast, times today's rate", 1.5, 0.01, 100)


class ConditionsMixin(forms.Form):
    """What goes wrong meanwhile."""

    fail = forms.CharField(
        label="Slots that break", required=False, max_length=1_000, widget=forms.Textarea(attrs={"rows": 2}),
        help_text="One on each line, after so many seconds for so many, such as S01@600+300",
    )  # fmt: skip
    standby = whole("Slots on standby", 0, 0, 512, "Ordered when the scaling signal asks for more", required=False)
    start_up_lag_s = number("Start-up lag, s", 300, 0, 86_400, "From the order to the first request", required=False)
    report_every_s = number("An agent reports every, s", 1, 0.1, 600, required=False)
    report_loss_percent = number("Reports that never arrive, %", 0, 0, 99, required=False)

    def clean_fail(self) -> str:
        text: str = self.cleaned_data["fail"]
        try:
            for line in text.split():
                read_failure(line)
        except ValueError as error:
            raise ValidationError(f"{error}.") from None
        return text


class ReplayForm(ConditionsMixin, LoadForm, ExperimentForm):
    """Traffic through one policy, or two side by side."""

    policy = forms.ChoiceField(label="Policy", choices=POLICIES, initial="reserved")
    against = forms.ChoiceField(label="Beside it", choices=(("", "Nothing"), *POLICIES), required=False)
    propose = forms.CharField(
        label="Changes to the second one", required=False, max_length=2_000, widget=forms.Textarea(attrs={"rows": 3}),
        help_text="A path and a value on each line, such as pool.flex.lend_p95_ms=150",
    )  # fmt: skip
    safe_rate = forms.CharField(
        label="Tested safe rates, requests/s", required=False, max_length=400,
        help_text="By slots that serve interactive, such as 4=8,8=16. Empty: nothing is lent",
    )  # fmt: skip

    def clean_propose(self) -> str:
        text = self.cleaned_data["propose"]
        self._readable(lambda: read_changes([line.strip() for line in text.splitlines() if line.strip()]))
        return text

    def clean_safe_rate(self) -> str:
        text = self.cleaned_data["safe_rate"].replace(" ", "")
        self._readable(lambda: read_safe_rate(text))
        return text

    def _readable(self, read: Any) -> None:
        try:
            read()
        except ValueError as error:
            raise ValidationError(f"{error}.") from None


class BatchingForm(ExperimentForm):
    """Sizes and waits of batches."""

    requests = whole("Requests", 2_000, 1, 100_000)
    rate = number("Rate, requests/s", 200, 0.01, 100_000)
    fixed_ms = number("A batch takes, ms", 4, 0, 60_000, "Besides its inputs")
    per_input_ms = number("And for each input, ms", 0.5, 0, 60_000)
    workers = whole("Batches that run at once", 1, 1, 64)
    slow = number("The last of them is slower, times", 1, 1, 100)
    burst = number("Rate in the first of each ten seconds, times", 1, 0.01, 100)


class EffectForm(WindowMixin, ExperimentForm):
    """What is saved now against what is in force, on what a pool served."""

    pool = forms.ChoiceField(label="Pool")
    objective_ms = number("Objective: time to first token, ms", 700, 1, 600_000)
    rows_max = whole(
        "Requests that are replayed at most", 20_000, 100, 200_000,
        "A larger window is cut to one stretch of it, drawn with the seed",
    )  # fmt: skip


class OffersForm(ExperimentForm):
    """Which machines for hire meet a requirement."""

    first_group = "Prices"
    # Nothing is drawn.
    seed = None  # type: ignore[assignment]
    file = forms.FileField(
        label="Price list", error_messages={"required": "Choose a price list."},
        help_text="CSV with the columns Cloud, GPU Type, GPUs and On-demand; at most 4 MB",
    )  # fmt: skip
    experiment = whole(
        "Measured by experiment", None, 1, 10**15, "A capacity test that is done: as many slots as can lose one",
        required=False,
    )  # fmt: skip
    gpus_per_slot = whole("GPUs of one of its slots", 1, 1, 64)
    count = whole("Or so many GPUs", None, 1, 100_000, required=False)
    gpu = forms.CharField(
        label="GPU type", required=False, max_length=60, help_text="Such as H100 or A100 (80 GB). Empty: any"
    )
    memory_gb = number("Memory of one GPU, GB", 0, 0, 10_000, "At least. 0: any")
    one_node = forms.BooleanField(label="All in one machine", required=False, initial=False)
    hours = whole("For, h", 730, 1, 100_000, "A month is 730")
    region = forms.CharField(
        label="Region", required=False, max_length=60, help_text="As the list spells it. Empty: any"
    )
    start_by = forms.DateField(label="Latest start", required=False, help_text="Such as 2026-12-01. Empty: any")
    spot = forms.BooleanField(
        label="Spot prices too", required=False, initial=False, help_text="Such machines can be taken away"
    )

    def clean(self) -> dict[str, Any]:
        found = super().clean() or self.cleaned_data
        file = found.get("file")
        if file is not None and file.size > FILE_BYTES_MAX:
            self.add_error("file", "The list has more than 4 MB: cut it.")
        if "count" in found and "experiment" in found and (found["count"] is None) == (found["experiment"] is None):
            self.add_error("count", "Give either a number of GPUs or the experiment that measured it.")
        if not found.get("gpu") and not found.get("memory_gb"):
            self.add_error("gpu", "Name a GPU type, or the memory of one.")
        found["file_name"] = "" if file is None else file.name[:100]
        return found

    def values(self, now: datetime) -> dict[str, Any]:
        found = super().values(now)
        start_by = found["start_by"]
        return {**found, "seed": 0, "start_by": None if start_by is None else start_by.isoformat()}


FORMS: Mapping[str, type[ExperimentForm]] = {
    Experiment.Kind.INTERFERENCE: TestForm,
    Experiment.Kind.REPLAY: ReplayForm,
    Experiment.Kind.OVERLOAD: TestForm,
    Experiment.Kind.DESIGNS: TestForm,
    Experiment.Kind.CAPACITY: TestForm,
    Experiment.Kind.BATCHING: BatchingForm,
    Experiment.Kind.EFFECT: EffectForm,
    Experiment.Kind.OFFERS: OffersForm,
}
GROUPS = (
    ("Traffic", ("title", "source", "pool", "until", "minutes", "rate_per_s", "file", "tenants", "requests", "rate",
                 "burst", "seed", "rows_max")),
    ("Batch job", ("batch_items", "deadline_h")),
    ("Fleet", ("slots", "per_slot", "kv_tokens", "floor_interactive", "floor_batch", "workers", "slow", "fixed_ms",
               "per_input_ms")),
    ("Service", ("service_model", "base_ms", "prompt_us", "output_us")),
    ("Policy", ("policy", "against", "propose", "safe_rate")),
    ("What goes wrong", ("fail", "standby", "start_up_lag_s", "report_every_s", "report_loss_percent")),
    ("Objective", ("objective_ms", "target_percent", "quality_percent", "forecast")),
    ("Requirement", ("experiment", "gpus_per_slot", "count", "gpu", "memory_gb", "one_node")),
    ("Terms", ("hours", "start_by", "region", "spot")),
)  # fmt: skip
"""Fields of the page in their order, under their headings."""


def initial_of(kind: str, pool_slug: str, experiment: str = "") -> dict[str, Any]:
    """Where a page begins: the kind's title, a pool's own fleet, and the test that measured, where they are named."""
    found: dict[str, Any] = {"title": Experiment.Kind(kind).label}
    if experiment.isdecimal():
        found["experiment"] = int(experiment)
    pool = Pool.objects.filter(slug=pool_slug, archived_at__isnull=True).first()
    if pool is None:
        return found
    slots = list(Slot.objects.filter(pool=pool, removed_at__isnull=True).values_list("band", "places", "kv_tokens"))
    found |= {"pool": pool.slug, "source": "usage", "service_model": "fitted"}
    if slots:
        bands = [band for band, _, _ in slots]
        found |= {
            "slots": len(slots), "per_slot": max(places for _, places, _ in slots),
            "kv_tokens": min(tokens for _, _, tokens in slots), "floor_interactive": bands.count("interactive"),
            "floor_batch": bands.count("batch"),
        }  # fmt: skip
    return found


class SafeRateForm(ReasonForm):
    """Which pool takes the rates that were found, and for how long they hold."""

    pool = forms.ChoiceField(label="Pool", help_text="Its fleet and model are those that were tested")
    days = whole("Valid for, days", 90, 1, 365, "After that nothing is lent until it is tested again")
    field_order = ("pool", "days", "reason")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["pool"].choices = pool_choices()  # type: ignore[attr-defined]
