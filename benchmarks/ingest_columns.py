"""The columns of a usage record by name and kind, for both sides of the benchmark."""

COLUMNS = (
    ("request_id", "uuid"), ("received_at", "time"), ("arrived_at", "time"), ("ended_at", "time"), ("attempt", "int2"),
    ("agent_id", "int4"), ("pool_id", "int4"), ("slot_id", "int4"), ("tenant_id", "int4"), ("key_id", "int4"),
    ("class_id", "int4"), ("asked_class_id", "int4"), ("model_id", "int4"), ("job_id", "int8"), ("revision", "int4"),
    ("rate_version", "int4"), ("outcome", "int2"), ("status", "int2"), ("flags", "int2"), ("prompt_tokens", "int4"),
    ("cached_tokens", "int4"), ("output_tokens", "int4"), ("admission_us", "int8"), ("queue_us", "int8"),
    ("batch_wait_us", "int8"), ("preprocess_us", "int8"), ("prefill_us", "int8"), ("decode_us", "int8"),
    ("return_us", "int8"), ("ttft_us", "int8"), ("gpu_us", "int8"), ("estimated_gpu_us", "int8"),
    ("charge_prompt_nanos", "int8"), ("charge_cached_nanos", "int8"), ("charge_output_nanos", "int8"),
    ("charge_gpu_nanos", "int8"), ("client_request_id", "text"),
)  # fmt: skip
