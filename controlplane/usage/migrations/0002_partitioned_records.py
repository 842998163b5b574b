"""The record table: partitioned by the UTC day of receipt, BRIN on it, no unique index (see docs/decisions)."""

from django.db import migrations

CREATE = """
CREATE TABLE usage_record (
    request_id uuid NOT NULL,
    received_at timestamptz NOT NULL,
    arrived_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    attempt smallint NOT NULL,
    agent_id integer NOT NULL,
    pool_id integer NOT NULL,
    slot_id integer NOT NULL,
    tenant_id integer NOT NULL,
    key_id integer NOT NULL,
    class_id integer NOT NULL,
    asked_class_id integer NOT NULL,
    model_id integer NOT NULL,
    job_id bigint NOT NULL,
    revision integer NOT NULL,
    rate_version integer NOT NULL,
    outcome smallint NOT NULL,
    status smallint NOT NULL,
    flags smallint NOT NULL,
    prompt_tokens integer NOT NULL,
    cached_tokens integer NOT NULL,
    output_tokens integer NOT NULL,
    admission_us bigint NOT NULL,
    queue_us bigint NOT NULL,
    batch_wait_us bigint NOT NULL,
    preprocess_us bigint NOT NULL,
    prefill_us bigint NOT NULL,
    decode_us bigint NOT NULL,
    return_us bigint NOT NULL,
    ttft_us bigint NOT NULL,
    gpu_us bigint NOT NULL,
    estimated_gpu_us bigint NOT NULL,
    charge_prompt_nanos bigint NOT NULL,
    charge_cached_nanos bigint NOT NULL,
    charge_output_nanos bigint NOT NULL,
    charge_gpu_nanos bigint NOT NULL,
    client_request_id text NOT NULL
) PARTITION BY RANGE (received_at);
CREATE INDEX usage_record_received_at ON usage_record USING brin (received_at);
"""


class Migration(migrations.Migration):
    dependencies = [("usage", "0001_initial")]
    operations = [migrations.RunSQL(CREATE, "DROP TABLE usage_record")]
