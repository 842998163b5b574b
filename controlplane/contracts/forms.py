"""Forms of classes and contracts: parsing, units and wording; the rules are the actions'."""

from collections.abc import Mapping
from typing import Any

from django import forms

from controlplane.contracts.models import ContractVersion, WorkloadClass
from controlplane.contracts.wording import METRIC_NAMES, share_text, span_text
from controlplane.fleet.edit_flow import Section, SectionedForm
from controlplane.fleet.forms import PercentField, SlugField, UtcField, whole
from controlplane.fleet.models import ServedModel
from controlplane.fleet.percent import percent_of_ppm, ppm_of_percent
from controlplane.tenants.tenant_field import TenantField

DAY_S = 86_400
KINDS = [
    ("interactive", "Interactive: judged by latency, served first"),
    ("batch", "Batch: judged by deadlines, may be lent slots"),
]


class ClassForm(SectionedForm):
    """All of a class but its state; short name and kind only for a new one."""

    slug = SlugField()
    name = forms.CharField(label="Name", max_length=120, required=False, help_text="Empty: the short name.")
    kind = forms.ChoiceField(
        label="Kind", choices=KINDS, initial="interactive", help_text="It never changes.", widget=forms.RadioSelect
    )
    priority = whole(
        "Priority",
        most=10_000,
        initial=100,
        help_text="For engines that schedule by it: a lower number is served earlier.",
    )
    min_share = PercentField(
        label="Minimum share, %",
        initial=0,
        help_text="Of the slots, in shared pools. In reserved and dedicated pools the floor is the share.",
    )
    max_prompt_tokens = whole("Prompt at most, tokens", least=1, initial=8_192)
    max_output_tokens = whole("Output at most, tokens", least=1, initial=2_048)
    default_output_tokens = whole("Output expected, tokens", initial=256, help_text="Until a tenant's own is known.")
    template_allowance_tokens = whole("Chat template, tokens", initial=64, help_text="Added to the budget's bound.")
    max_queue = whole("Queue at most, requests", initial=64, help_text="Per agent.")
    max_wait_ms = whole("Wait at most, ms", initial=2_000, help_text="Estimated wait over which it is refused.")
    stage_timeout_s = whole("Time-out of a stage, s", least=1, initial=300)
    overload = forms.ChoiceField(
        label="Under overload",
        choices=[
            ("reject", "Reject: refuse with the time to try again"),
            ("queue", "Queue: take it and say the estimated wait"),
            ("downgrade", "Downgrade: send it to another class"),
            ("cancel", "Cancel: drop the newest of lower precedence"),
        ],
        initial="reject",
    )
    downgrade_to = forms.ModelChoiceField(
        label="Downgrade to",
        queryset=WorkloadClass.objects.none(),
        to_field_name="slug",
        required=False,
        empty_label="None",
        help_text="At most one step; circles are refused.",
    )
    cancellable = forms.BooleanField(label="May be cancelled while it runs", required=False, initial=True)
    retry_safe = forms.BooleanField(
        label="May be sent again after a cancel", required=False, help_text="Only while no byte was sent to the client."
    )
    default_deadline_h = forms.DecimalField(
        label="Deadline of a request without a job, h",
        min_value=0,
        max_value=8_784,
        decimal_places=2,
        initial=24,
        help_text="After its arrival; for batch.",
    )
    model_names = forms.MultipleChoiceField(
        label="Models", required=False, widget=forms.CheckboxSelectMultiple, help_text="None chosen: every model."
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    UNITS = {
        "max_prompt_tokens": "tokens", "max_output_tokens": "tokens", "default_output_tokens": "tokens",
        "template_allowance_tokens": "tokens", "max_queue": "requests", "max_wait_ms": "ms", "stage_timeout_s": "s",
        "min_share": "%", "default_deadline_h": "h",
    }  # fmt: skip
    SECTIONS = (
        Section("Class", (("slug", "name"), ("kind",), ("priority", "min_share"), ("model_names",))),
        Section(
            "Size of a request",
            (("max_prompt_tokens", "max_output_tokens"), ("default_output_tokens", "template_allowance_tokens")),
        ),
        Section(
            "Waiting and overload",
            (
                ("max_queue", "max_wait_ms"),
                ("overload", "downgrade_to"),
                ("stage_timeout_s", "default_deadline_h"),
                ("cancellable", "retry_safe"),
            ),
        ),
    )

    def __init__(self, *args: Any, row: WorkloadClass | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        others = WorkloadClass.objects.exclude(state="archived").order_by("slug")
        if row is not None:
            del self.fields["slug"], self.fields["kind"]
            others = others.exclude(pk=row.pk).filter(kind=row.kind)
        target: Any = self.fields["downgrade_to"]
        target.queryset = others
        target.label_from_instance = lambda other: f"{other.slug} ({other.kind})"
        names = list(ServedModel.objects.order_by("name").values_list("name", flat=True))
        held = [name for name in (row.model_names if row else []) if name not in names]
        self.fields["model_names"].choices = [(name, name) for name in [*names, *held]]  # type: ignore[attr-defined]

    def values(self) -> dict[str, Any]:
        data = dict(self.cleaned_data)
        for name in ("slug", "kind", "version"):
            data.pop(name, None)
        data["min_share_ppm"] = ppm_of_percent(data.pop("min_share"))
        data["default_deadline_s"] = int(data.pop("default_deadline_h") * 3_600)
        return data


def class_initial(row: WorkloadClass) -> dict[str, Any]:
    values = {name: getattr(row, name) for name in ClassForm.base_fields if hasattr(row, name)}
    return {
        **values,
        "min_share": percent_of_ppm(row.min_share_ppm),
        "default_deadline_h": f"{row.default_deadline_s / 3_600:.2f}".rstrip("0").rstrip("."),
        "downgrade_to": row.downgrade_to.slug if row.downgrade_to else None,
    }


def class_labels() -> dict[str, str]:
    labels = {name: str(item.label) for name, item in ClassForm.base_fields.items()}
    labels.pop("version")
    return labels


def class_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of CLASS_FIELDS as a review shows them."""
    target = values.get("downgrade_to")
    return {
        **values,
        "min_share": percent_of_ppm(values["min_share_ppm"]),
        "default_deadline_h": f"{values['default_deadline_s'] / 3_600:g}",
        "downgrade_to": target.slug if target else None,
    }


class ContractForm(SectionedForm):
    """A contract's next version; for a new contract also what it is about."""

    slug = SlugField()
    name = forms.CharField(label="Name", max_length=120, required=False, help_text="Empty: the short name.")
    workload_class = forms.ModelChoiceField(
        label="Class", queryset=WorkloadClass.objects.none(), to_field_name="slug", empty_label=None
    )
    tenant = TenantField(required=False, help_text="Its short name. Empty: everyone in the class.")
    objective = forms.ChoiceField(
        label="Promise",
        choices=[
            ("latency", "Interactive latency: a share of requests is fast enough, over a rolling window"),
            ("deadline", "Batch deadline: a share of jobs is finished by a wall-clock time"),
        ],
        initial="latency",
        widget=forms.RadioSelect,
    )
    target = PercentField(
        label="Target share, %", help_text="This is the percentile: 99 % means p99 within the threshold.", initial=99
    )
    metric = forms.ChoiceField(
        label="What is timed",
        choices=[(key, text[0].upper() + text[1:]) for key, text in METRIC_NAMES.items()],
        initial="ttft",
        help_text="From the last byte of the request at the agent.",
    )
    threshold_ms = whole("Threshold, ms", initial=700)
    window_min = whole("Rolling window, min", least=1, most=43_200, initial=15, help_text="The verdict's window.")
    load_limit_per_s = forms.FloatField(
        label="Load range up to, requests/s",
        required=False,
        min_value=0,
        max_value=1e6,
        help_text="Admitted. Minutes above it leave the verdict, counted and shown. Empty: any load.",
    )
    population = forms.ChoiceField(
        label="Population",
        choices=[
            ("offered", "Offered: refused and timed out count as bad"),
            ("admitted", "Admitted: refused do not count"),
            ("successful", "Successful: only completed requests"),
        ],
        initial="offered",
        widget=forms.RadioSelect,
        help_text="All three are always shown; this one gives the verdict.",
    )
    min_events = whole("Events for a verdict", least=1, initial=100, help_text="Fewer are unknown, never 100 %.")
    budget_period_d = whole("Error budget over, days", least=1, most=90, initial=30)
    admitted_before = forms.TimeField(
        label="Admitted before", required=False, widget=forms.TimeInput(attrs={"type": "time"}, format="%H:%M")
    )
    finished_by = forms.TimeField(
        label="Finished by", required=False, widget=forms.TimeInput(attrs={"type": "time"}, format="%H:%M")
    )
    zone = forms.CharField(label="Time zone", max_length=64, initial="UTC", help_text="Such as Europe/Berlin.")
    first_attempt_within_min = whole("First attempt within, min", required=False, help_text="Empty: no such promise.")
    effective_from = UtcField(
        label="Takes effect, UTC",
        required=False,
        help_text="Requests are judged by the version in force at their arrival. Empty: at once.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    UNITS = {
        "target": "%", "threshold_ms": "ms", "window_min": "min", "load_limit_per_s": "requests/s",
        "budget_period_d": "days", "first_attempt_within_min": "min",
    }  # fmt: skip
    _WHAT = Section("What it is about", (("slug", "name"), ("workload_class", "tenant")))
    _PROMISE = Section("What is promised", (("objective",), ("target", "budget_period_d")))
    _LATENCY = Section(
        "Interactive objective",
        (("metric", "threshold_ms"), ("window_min", "load_limit_per_s"), ("population",), ("min_events",)),
    )
    _DEADLINE = Section("Batch objective", (("admitted_before", "finished_by"), ("zone", "first_attempt_within_min")))
    _START = Section("Start", (("effective_from",),))

    def __init__(self, *args: Any, kind: str = "", new: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.SECTIONS = (self._WHAT, self._PROMISE, self._LATENCY, self._DEADLINE, self._START)
        if new:
            of_class: Any = self.fields["workload_class"]
            of_class.queryset = WorkloadClass.objects.exclude(state="archived").order_by("slug")
            of_class.label_from_instance = lambda row: f"{row.slug} ({row.kind})"
            of_class.initial = of_class.queryset.filter(kind="interactive").values_list("slug", flat=True).first()
            return
        # the kind of the class decides the objective, so the other one's fields are not asked for
        for name in ("slug", "name", "workload_class", "tenant", "objective"):
            del self.fields[name]
        other = self._DEADLINE if kind == "interactive" else self._LATENCY
        for row in other.rows:
            for name in row:
                del self.fields[name]
        self.SECTIONS = (self._PROMISE, self._LATENCY if kind == "interactive" else self._DEADLINE, self._START)

    def values(self) -> dict[str, Any]:
        """Values of VERSION_FIELDS, as far as the form asks for them."""
        data = self.cleaned_data
        plain = (
            "objective", "metric", "threshold_ms", "load_limit_per_s", "population", "min_events", "admitted_before",
            "finished_by", "zone",
        )  # fmt: skip
        values = {name: data[name] for name in plain if name in data}
        if "target" in data:
            values["target_ppm"] = ppm_of_percent(data["target"])
        for name, seconds, field in (
            ("window_min", 60, "window_s"),
            ("budget_period_d", DAY_S, "budget_period_s"),
            ("first_attempt_within_min", 60, "first_attempt_within_s"),
        ):
            if name in data:
                values[field] = data[name] * seconds if data[name] is not None else None
        return values


def contract_initial(version: ContractVersion) -> dict[str, Any]:
    plain = {name: getattr(version, name) for name in ContractForm.base_fields if hasattr(version, name)}
    within = version.first_attempt_within_s
    return {
        **plain,
        "target": percent_of_ppm(version.target_ppm),
        "window_min": version.window_s // 60,
        "budget_period_d": max(version.budget_period_s // DAY_S, 1),
        "first_attempt_within_min": None if within is None else within // 60,
        "effective_from": None,
    }


CONTRACT_LABELS = {
    "slug": "Short name", "name": "Name", "workload_class": "Class", "tenant": "Tenant", "objective": "Promise",
    "target": "Target share", "metric": "What is timed", "threshold_ms": "Threshold, ms", "window": "Rolling window",
    "load_limit_per_s": "Load range up to, requests/s", "population": "Population",
    "min_events": "Events for a verdict", "budget_period": "Error budget over",
    "admitted_before": "Admitted before", "finished_by": "Finished by", "zone": "Time zone",
    "first_attempt_within": "First attempt within", "effective_from": "Takes effect",
}  # fmt: skip


def contract_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of VERSION_FIELDS as a review shows them; only those that are there."""
    shown = dict(values)
    if "target_ppm" in values:
        shown["target"] = share_text(values["target_ppm"])
    for name in ("window", "budget_period", "first_attempt_within"):
        field = f"{name}_s"
        if field in values:
            shown[name] = span_text(values[field]) if values[field] else ""
    for name in ("admitted_before", "finished_by"):
        if values.get(name):
            shown[name] = f"{values[name]:%H:%M}"
    if values.get("load_limit_per_s") is not None:
        shown["load_limit_per_s"] = f"{values['load_limit_per_s']:g}"
    return shown
