"""A batch in OpenAI's form (`openai_form.batch_form`), as the REST description tells it. Times are Unix seconds."""

from drf_spectacular.utils import inline_serializer
from rest_framework import serializers

from controlplane.jobs.models import Batch


def _instant() -> serializers.IntegerField:
    return serializers.IntegerField(allow_null=True)


class BatchErrorSerializer(serializers.Serializer):
    """What is wrong with a file; `line` null: the file as a whole."""

    code = serializers.CharField()
    message = serializers.CharField()
    param = serializers.CharField(allow_null=True)
    line = serializers.IntegerField(allow_null=True)


class BatchSerializer(serializers.Serializer):
    """A batch; `admission` is the arithmetic of its job, null until there is one."""

    id = serializers.CharField()
    object = serializers.CharField()
    endpoint = serializers.CharField()
    model = serializers.CharField(allow_null=True)
    errors = inline_serializer(  # type: ignore[assignment]
        "BatchErrors",
        {"object": serializers.CharField(), "data": BatchErrorSerializer(many=True)},
        allow_null=True,
    )
    input_file_id = serializers.CharField()
    completion_window = serializers.CharField()
    status = serializers.ChoiceField(Batch.State.choices)
    output_file_id = serializers.CharField(allow_null=True)
    error_file_id = serializers.CharField(allow_null=True)
    created_at = serializers.IntegerField()
    in_progress_at = _instant()
    expires_at = _instant()
    finalizing_at = _instant()
    completed_at = _instant()
    failed_at = _instant()
    expired_at = _instant()
    cancelling_at = _instant()
    cancelled_at = _instant()
    request_counts = inline_serializer(
        "BatchCounts",
        {name: serializers.IntegerField() for name in ("total", "completed", "failed")},
    )
    metadata = serializers.DictField(child=serializers.CharField(), allow_null=True)
    admission = serializers.JSONField(allow_null=True)
