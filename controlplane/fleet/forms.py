"""Forms of pools, slots and agents: parsing, units and wording; the rules are the actions'."""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError

from controlplane.fleet.edit_flow import Section, SectionedForm
from controlplane.fleet.models import Pool, ServedModel, Slot
from controlplane.fleet.percent import percent_of_ppm, ppm_of_percent
from controlplane.fleet.pool_rules import BATCH_SIZE_MOST, BATCH_WAIT_MOST_MS
from controlplane.fleet.served_classes import served_classes
from controlplane.tenants.models import SLUG

LARGE = 2**31 - 1
PPM = 1_000_000
BANDS = [
    (Slot.Band.INTERACTIVE, "Interactive floor: always serves interactive"),
    (Slot.Band.BATCH, "Batch floor: always serves batch"),
    (Slot.Band.FLEX, "Flex: interactive, lent to batch while it is idle"),
]


class PercentField(forms.DecimalField):
    """Per cent from 0 to 100 with four decimals; `ppm_of_percent` makes millionths of it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"min_value": 0, "max_value": 100, "max_digits": 7, "decimal_places": 4, **options})


class UtcField(forms.DateTimeField):
    """An instant, typed in UTC."""

    def __init__(self, **options: Any) -> None:
        widget = forms.DateTimeInput(attrs={"type": "datetime-local"}, format="%Y-%m-%dT%H:%M")
        formats = ["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M"]
        super().__init__(**{"widget": widget, "input_formats": formats, **options})


def whole(label: str, *, least: int = 0, most: int = LARGE, **options: Any) -> forms.IntegerField:
    return forms.IntegerField(label=label, min_value=least, max_value=most, **options)


class SlugField(forms.CharField):
    def __init__(self, **options: Any) -> None:
        hint = "1 to 63 lower-case letters, digits and hyphens. It stands in addresses and exports and never changes."
        super().__init__(
            **{
                "label": "Short name",
                "max_length": 63,
                "validators": [SLUG],
                "help_text": hint,
                **options,
            }
        )


class SafeRateField(forms.CharField):
    """One line per number of slots, `4: 16.0`; {"4": 16.0} inside."""

    widget = forms.Textarea(attrs={"rows": 4, "class": "mono"})

    def to_python(self, value: Any) -> dict[str, float]:  # type: ignore[override]
        table: dict[str, float] = {}
        for number, line in enumerate((value or "").splitlines(), 1):
            if not line.strip():
                continue
            slots, _, rate = line.replace("=", ":").partition(":")
            try:
                table[str(int(slots))] = float(rate)
            except ValueError:
                raise ValidationError(
                    f"Line {number} cannot be read. Write slots, a colon and requests per second, such as 4: 16.0."
                ) from None
        return table


class NumberListField(forms.CharField):
    """`500, 5000`; a list of integers inside."""

    def to_python(self, value: Any) -> list[int]:  # type: ignore[override]
        try:
            return [int(part) for part in (value or "").replace(",", " ").split()]
        except ValueError:
            raise ValidationError("Write whole numbers with commas between them, such as 500, 5000.") from None


class PoolForm(SectionedForm):
    """All of a pool; the short name and the model only for a new one."""

    slug = SlugField()
    name = forms.CharField(label="Name", max_length=120, required=False, help_text="Empty: the short name.")
    model = forms.CharField(
        label="Model", max_length=120, help_text="As requests name it. A pool serves one model and keeps it."
    )
    gpu_type = forms.CharField(label="GPU", max_length=60, help_text="What one slot runs on, such as H100 or 4x H100.")
    isolation = forms.ChoiceField(
        label="Isolation",
        choices=[
            ("reserved", "Reserved: floors, and a flex band that is lent under control"),
            ("dedicated", "Dedicated: each slot serves its home class only"),
            ("shared", "Shared: any slot serves any class, interactive first"),
        ],
        initial="reserved",
        widget=forms.RadioSelect,
    )
    interactive_class = forms.ChoiceField(label="Interactive class", required=False)
    batch_class = forms.ChoiceField(label="Batch class", required=False)
    fairness_unit = forms.ChoiceField(
        label="Unit of fair shares",
        choices=[("tokens", "Tokens, weighted"), ("gpu_time", "GPU time"), ("requests", "Requests")],
        initial="tokens",
        help_text="What tenants' shares are counted in.",
    )
    prompt_weight = whole("Weight of a prompt token", most=1000, initial=1, help_text="With the unit tokens.")
    output_weight = whole("Weight of an output token", most=1000, initial=2, help_text="With the unit tokens.")
    size_bounds_gpu_ms = NumberListField(
        label="Size classes, GPU ms", required=False, help_text="Bounds between sizes, smallest first: 500, 5000."
    )
    aging_s = whole("Ageing, s", least=1, initial=10, help_text="A request that waited longer goes first.")
    reserve_after_ms = whole("Reserve after, ms", initial=2_000, help_text="Then memory is kept for a head that waits.")
    prefill_us_per_token = whole("Prefill per token, µs", initial=60, help_text="Amortised; used until meters know.")
    decode_us_per_token = whole("Decode per token, µs", least=1, initial=2_500, help_text="Amortised, as above.")
    max_batch_size = whole(
        "Batch at most, inputs",
        least=1,
        most=BATCH_SIZE_MOST,
        initial=1,
        help_text="Of embeddings, run together on a slot. 1: no batching. Its places bound the requests in a batch.",
    )
    max_batch_wait_ms = whole(
        "Oldest waits at most, ms",
        most=BATCH_WAIT_MOST_MS,
        initial=0,
        help_text="Then the batch runs as it is. The wait is a stage of the request's time.",
    )

    lend_p95_ms = whole("Queue wait p95 must stay under, ms", least=1, initial=200)
    lend_hold_s = whole("… held for, s", initial=600)
    load_limit = forms.FloatField(
        label="Load must stay under",
        min_value=0,
        max_value=1,
        initial=0.7,
        help_text="Admitted rate / safe rate, 0 to 1.",
    )
    lend_slack = forms.FloatField(
        label="Lend when slack is under", min_value=0, max_value=1, initial=0.25, help_text="1 − required / available."
    )
    return_slack = forms.FloatField(
        label="Return when slack stays over",
        min_value=0,
        max_value=1,
        initial=0.35,
        help_text="Without the slot. Must be over the one before.",
    )
    return_hold_s = whole("… held for, s", initial=60)
    min_hold_s = whole("Shortest loan, s", initial=60, help_text="Interactive reasons override it.")
    drain_bound_s = whole("Drain bound, s", least=1, initial=30, help_text="Then batch is cancelled, or it is overdue.")
    grant_ttl_s = whole("Grant lives, s", least=1, initial=15, help_text="5 s or more; renewed every tick.")
    cooldown_s = whole("Pause after a recall, s", initial=300)
    decision_interval_s = whole("Between two loans, s", least=1, initial=30)
    max_lent = whole("Slots lent at most", required=False, help_text="Empty: all flex slots.")
    spillover_per_week = whole("Loans a week", initial=20)
    spillover_action = forms.ChoiceField(
        label="Over the weekly number", choices=[("warn", "Warn and go on"), ("block", "Lend no more")], initial="warn"
    )
    demo_values = forms.BooleanField(
        label="Shortened for a demonstration", required=False, help_text="Pages of the pool then say “demo values”."
    )

    safe_entries = SafeRateField(
        label="Safe rate, requests/s by slots that serve interactive",
        required=False,
        help_text="One line each, such as 4: 16.0. Between the lines it is interpolated. Empty: nothing is lent.",
    )
    safe_measured_at = UtcField(label="Measured, UTC", required=False)
    safe_valid_until = UtcField(label="Valid until, UTC", required=False, help_text="An expired table lends nothing.")
    safe_trace = forms.CharField(label="Trace", max_length=200, required=False, help_text="Which traffic it was.")

    idle_policy = forms.ChoiceField(
        label="Idle time is paid",
        choices=[
            ("usage", "By usage in the class"),
            ("weights", "By the tenants' weights"),
            ("even", "Evenly by the class's tenants"),
            ("platform", "By the platform"),
        ],
        initial="usage",
    )
    lend_price = PercentField(
        label="Lend price, % of the slot's cost",
        initial=0,
        help_text="What batch pays interactive for lent time, on top of ownership.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    UNITS = {
        "lend_p95_ms": "ms", "lend_hold_s": "s", "return_hold_s": "s", "min_hold_s": "s", "drain_bound_s": "s",
        "grant_ttl_s": "s", "cooldown_s": "s", "decision_interval_s": "s", "aging_s": "s", "reserve_after_ms": "ms",
        "prefill_us_per_token": "µs", "decode_us_per_token": "µs", "lend_price": "%", "spillover_per_week": "per week",
        "max_lent": "slots", "max_batch_size": "inputs", "max_batch_wait_ms": "ms",
    }  # fmt: skip
    SECTIONS = (
        Section(
            "Pool", (("slug", "name"), ("model", "gpu_type"), ("isolation",), ("interactive_class", "batch_class")),
        ),
        Section(
            "Lending",
            (
                ("lend_p95_ms", "lend_hold_s"),
                ("load_limit", "lend_slack"),
                ("max_lent", "decision_interval_s"),
                ("spillover_per_week", "spillover_action"),
            ),
            lead="A flex slot is lent when all of these hold.",
        ),
        Section(
            "Return and recall",
            (
                ("return_slack", "return_hold_s"),
                ("min_hold_s", "drain_bound_s"),
                ("grant_ttl_s", "cooldown_s"),
                ("demo_values",),
            ),
            lead="Interactive reasons recall every lent slot at once; the batch reason returns one.",
        ),
        Section(
            "Tested safe rate", (("safe_entries",), ("safe_measured_at", "safe_valid_until"), ("safe_trace",)),
        ),
        Section(
            "Fair shares and sizes",
            (
                ("fairness_unit", "prompt_weight", "output_weight"),
                ("size_bounds_gpu_ms", "aging_s", "reserve_after_ms"),
                ("prefill_us_per_token", "decode_us_per_token"),
            ),
        ),
        Section(
            "Batching of one-shot work", (("max_batch_size", "max_batch_wait_ms"),),
            lead="For embeddings: a batch closes when it is full or its oldest request has waited, whichever is first.",
        ),
        Section("Cost", (("idle_policy", "lend_price"),)),
    )  # fmt: skip

    def __init__(self, *args: Any, pool: Pool | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if pool is not None:
            del self.fields["slug"]
            self.fields["model"].disabled = True
        else:
            names = ", ".join(ServedModel.objects.order_by("name").values_list("name", flat=True)[:5])
            self.fields["model"].help_text += f" Known: {names}." if names else ""
        known = served_classes()
        for kind in ("interactive", "batch"):
            held = getattr(pool, f"{kind}_class", "")
            choices = [(row.slug, f"{row.slug} ({row.name})") for row in known if row.kind == kind]
            if held and held not in dict(choices):
                choices.append((held, f"{held} (not in use)"))
            self.fields[f"{kind}_class"].choices = [("", "None"), *choices]  # type: ignore[attr-defined]

    def values(self) -> dict[str, Any]:
        """What the actions take, without slug and model."""
        data = dict(self.cleaned_data)
        for name in ("slug", "model", "version"):
            data.pop(name, None)
        entries = data.pop("safe_entries")
        measured, valid, trace = data.pop("safe_measured_at"), data.pop("safe_valid_until"), data.pop("safe_trace")
        told = {"entries": entries, "measured_at": _written(measured), "trace": trace, "valid_until": _written(valid)}
        data["safe_rate"] = {name: value for name, value in told.items() if value}
        data["lend_price_share_ppm"] = ppm_of_percent(data.pop("lend_price"))
        return data


def pool_initial(pool: Pool) -> dict[str, Any]:
    """The form's values of a saved pool."""
    raw = pool.safe_rate or {}
    values = {name: getattr(pool, name) for name in PoolForm.base_fields if hasattr(pool, name)}
    return {
        **values,
        "model": pool.model.name,
        "size_bounds_gpu_ms": ", ".join(map(str, pool.size_bounds_gpu_ms)),
        "lend_price": percent_of_ppm(pool.lend_price_share_ppm),
        "safe_entries": safe_rate_text(raw.get("entries") or {}),
        "safe_measured_at": _read(raw.get("measured_at")),
        "safe_valid_until": _read(raw.get("valid_until")),
        "safe_trace": raw.get("trace") or "",
    }


def pool_labels() -> dict[str, str]:
    """Labels of what a review compares, in the form's order."""
    labels = {name: str(item.label).removeprefix("… ") for name, item in PoolForm.base_fields.items()}
    labels.pop("version")
    labels |= {"lend_hold_s": "Queue wait held for, s", "return_hold_s": "Slack held for, s"}
    return labels


def pool_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of POOL_FIELDS as a review shows them, saved and typed ones alike."""
    raw = values.get("safe_rate") or {}
    shown = dict(values)
    shown["lend_price"] = percent_of_ppm(shown.pop("lend_price_share_ppm", 0))
    shown["size_bounds_gpu_ms"] = list(shown.get("size_bounds_gpu_ms") or [])
    shown["safe_entries"] = safe_rate_text(raw.get("entries") or {}).replace("\n", ", ")
    for name in ("measured_at", "valid_until"):
        at = _read(raw.get(name))
        shown[f"safe_{name}"] = f"{at:%Y-%m-%d %H:%M} UTC" if at else ""
    shown["safe_trace"] = raw.get("trace") or ""
    return shown


def safe_rate_text(entries: Mapping[str, float]) -> str:
    return "\n".join(
        f"{slots}: {float(rate):g}" for slots, rate in sorted(entries.items(), key=lambda pair: int(pair[0]))
    )


def _written(at: datetime | None) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z") if at else ""


def _read(text: Any) -> datetime | None:
    try:
        at = datetime.fromisoformat(str(text)) if text else None
    except ValueError:
        return None
    return at.replace(tzinfo=UTC) if at is not None and at.tzinfo is None else at


class SlotsForm(SectionedForm):
    """Several slots of one kind."""

    names = forms.CharField(
        label="Names", help_text="One or more, with spaces or commas between them: f1, f2. At most 32 characters each."
    )
    band = forms.ChoiceField(
        label="Band",
        choices=BANDS,
        initial=Slot.Band.INTERACTIVE,
        help_text="A slot's permanent home.",
        widget=forms.RadioSelect,
    )
    places = whole("Places", least=1, most=100_000, initial=4, help_text="Requests that run at the same time.")
    kv_tokens = whole("KV memory, tokens", least=1, initial=60_000, help_text="Prompt and output of all that run.")
    gpus = forms.DecimalField(
        label="GPUs",
        min_value=Decimal("0.000001"),
        max_value=1000,
        decimal_places=6,
        initial=1,
        help_text="1 is a whole GPU, 0.5 half of one, 4 four.",
    )
    version = forms.IntegerField(widget=forms.HiddenInput, required=False)

    SECTIONS = (Section("Slots", (("names",), ("band",), ("places", "kv_tokens", "gpus"))),)
    UNITS = {"kv_tokens": "tokens"}

    def __init__(self, *args: Any, slot: Slot | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if slot is not None:
            del self.fields["names"]

    def clean_names(self) -> list[str]:
        names = self.cleaned_data["names"].replace(",", " ").split()
        if any(len(name) > 32 for name in names):
            raise ValidationError("A name has at most 32 characters.")
        return names

    def values(self) -> dict[str, Any]:
        data = self.cleaned_data
        return {
            "band": data["band"], "places": data["places"], "kv_tokens": data["kv_tokens"],
            "gpu_share_ppm": int(data["gpus"] * PPM),
        }  # fmt: skip


SLOT_LABELS = {
    "names": "Names", "band": "Band", "places": "Places", "kv_tokens": "KV memory, tokens", "gpus": "GPUs",
}  # fmt: skip


def slot_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {**values, "gpus": f"{values['gpu_share_ppm'] / PPM:g}"}


def slot_initial(slot: Slot) -> dict[str, Any]:
    return {
        "band": slot.band, "places": slot.places, "kv_tokens": slot.kv_tokens, "version": slot.version,
        "gpus": f"{slot.gpu_share_ppm / PPM:g}",
    }  # fmt: skip


class EnrolForm(forms.Form):
    pool = forms.ModelChoiceField(
        label="Pool",
        queryset=Pool.objects.none(),
        to_field_name="slug",
        empty_label=None,
        help_text="An agent belongs to one pool and takes free slots of it, floors first.",
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        field: Any = self.fields["pool"]
        field.queryset = Pool.objects.filter(archived_at=None).order_by("slug")
        field.label_from_instance = lambda pool: f"{pool.slug} ({pool.gpu_type})"
