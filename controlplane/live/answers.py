"""What REST answers with live figures, for its description: the answers are made where pages take them from."""

from rest_framework import serializers

from controlplane.alerts.api import CauseSerializer


class AlertRowSerializer(serializers.Serializer):
    """An open alert; `id` is null until it was kept, `note` says who acknowledged or silenced it."""

    id = serializers.IntegerField(allow_null=True)
    key = serializers.CharField()
    kind = serializers.CharField()
    grade = serializers.CharField()
    word = serializers.CharField()
    pool = serializers.CharField(allow_blank=True)
    contract = serializers.CharField(allow_blank=True)
    title = serializers.CharField()
    text = serializers.CharField(allow_blank=True)
    since = serializers.CharField(allow_null=True)
    url = serializers.CharField()
    note = serializers.CharField(allow_blank=True)
    causes = CauseSerializer(many=True)


class OpenAlertsSerializer(serializers.Serializer):
    """Open alerts, loudest first."""

    at = serializers.DateTimeField()
    results = AlertRowSerializer(many=True)


class PopulationSerializer(serializers.Serializer):
    """One of the three populations of a latency contract; null is unknown. `interval` is of the compliance."""

    total = serializers.IntegerField()
    good = serializers.IntegerField()
    bad = serializers.IntegerField()
    compliance = serializers.FloatField(allow_null=True)
    burn_rate = serializers.FloatField(allow_null=True)
    interval = serializers.ListField(child=serializers.FloatField(), allow_null=True)
    verdict = serializers.CharField()
    unknown_reason = serializers.CharField(allow_null=True)


class BurnAlertSerializer(serializers.Serializer):
    severity = serializers.CharField()
    factor = serializers.FloatField()
    long_s = serializers.IntegerField()
    short_s = serializers.IntegerField()
    long_burn = serializers.FloatField(allow_null=True)
    short_burn = serializers.FloatField(allow_null=True)
    firing = serializers.BooleanField()
    reason = serializers.CharField(allow_blank=True, allow_null=True)


class ContractStatusSerializer(serializers.Serializer):
    """A contract in force. Latency contracts have `populations` and what follows, batch contracts `night` and more."""

    contract = serializers.CharField()
    version = serializers.IntegerField()
    target = serializers.FloatField()
    verdict = serializers.CharField()
    unknown_reason = serializers.CharField(allow_null=True)
    met = serializers.BooleanField(allow_null=True)
    state = serializers.CharField()
    at = serializers.DateTimeField(required=False)
    population = serializers.CharField(required=False)
    populations = serializers.DictField(child=PopulationSerializer(), required=False)
    neutral = serializers.IntegerField(required=False)
    running = serializers.IntegerField(required=False)
    bad_by_cause = serializers.DictField(child=serializers.IntegerField(), required=False)
    minutes_in_range = serializers.IntegerField(required=False)
    minutes_out_of_range = serializers.IntegerField(required=False)
    offered_out_of_range = serializers.IntegerField(required=False)
    budget_left = serializers.FloatField(allow_null=True, required=False)
    burn = serializers.DictField(child=serializers.FloatField(allow_null=True), required=False)
    alerts = BurnAlertSerializer(many=True, required=False)
    night = serializers.CharField(required=False)
    due = serializers.DateTimeField(required=False)
    jobs = serializers.IntegerField(required=False)
    finished_in_time = serializers.IntegerField(required=False)
    waited_too_long = serializers.IntegerField(required=False)
    share = serializers.FloatField(allow_null=True, required=False)


class SloStatusSerializer(serializers.Serializer):
    """Contracts in force, each as it stands now."""

    at = serializers.DateTimeField()
    results = ContractStatusSerializer(many=True)


class StoryCheckSerializer(serializers.Serializer):
    name = serializers.CharField()
    value = serializers.CharField(allow_blank=True)
    limit = serializers.CharField(allow_blank=True)
    held = serializers.BooleanField()


class StoryAttemptSerializer(serializers.Serializer):
    number = serializers.IntegerField()
    outcome = serializers.CharField()
    status = serializers.IntegerField()
    charged = serializers.BooleanField()


class RefusalKindSerializer(serializers.Serializer):
    """Refusals of the request's minute that it can be one of."""

    tenant = serializers.CharField()
    pool = serializers.CharField()
    reason = serializers.CharField()
    status = serializers.IntegerField()
    count = serializers.IntegerField()
    unexplained = serializers.IntegerField()
    explained_examples = serializers.ListField(child=serializers.UUIDField())


# `class` is a word of the language, so the field cannot be declared like the others
RefusalKindSerializer._declared_fields["class"] = serializers.CharField()


class RequestStorySerializer(serializers.Serializer):
    """What is known of a request. A counted one has `minute` and `refusals`, the others have the rest."""

    request_id = serializers.UUIDField()
    state = serializers.ChoiceField(["ended", "admitted", "refused", "counted"])
    sentence = serializers.CharField()
    tenant = serializers.CharField(allow_null=True, required=False)
    pool = serializers.CharField(allow_blank=True, required=False)
    decision = serializers.CharField(allow_null=True, required=False)
    reason = serializers.CharField(allow_null=True, required=False)
    checks = StoryCheckSerializer(many=True, required=False)
    attempts = StoryAttemptSerializer(many=True, required=False)
    charge_nanos = serializers.IntegerField(required=False)
    minute = serializers.DateTimeField(required=False)
    refusals = RefusalKindSerializer(many=True, required=False)
