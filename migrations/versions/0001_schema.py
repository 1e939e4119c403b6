"""The whole schema, as it is since 2026-11-28. This file never changes: a test has its digest.

0002 begins with the first change of a table, a column or an index, or of what a row means. Each
change is a revision of its own, in a file named by its topic, behind the newest revision.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_access()
    _create_turns()
    _index_turns()
    _create_rollups()
    _create_whole_lives()
    _create_batches()
    _create_kept()
    watermarks = sa.table("watermarks", sa.column("name"), sa.column("value"))
    op.bulk_insert(watermarks, [{"name": "access", "value": 0}])


def downgrade() -> None:
    tables = (
        "kept_responses",
        "turn_contents",
        "cached_contents",
        "batch_rows",
        "batches",
        "horizon",
        "engine_epochs",
        "prefixes",
        "latency_rollups",
        "reason_rollups",
        "turn_rollups",
        "turns",
        "watermarks",
        "shared_limits",
        "api_keys",
        "workspaces",
    )
    for table in tables:
        op.drop_table(table)


def _create_access() -> None:
    op.create_table(
        "workspaces",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("display_name", sa.String(128), nullable=False, server_default=""),
        sa.Column("archived_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("requests_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrency", sa.BigInteger(), nullable=True),
        sa.Column("monthly_spend_nano", sa.BigInteger(), nullable=True),
        sa.Column("lease_share", sa.Double(), nullable=True),
        sa.Column("auto_cache", sa.String(16), nullable=True),
        sa.Column("auto_cache_ttl", sa.String(4), nullable=True),
        sa.Column("keep_days", sa.BigInteger(), nullable=True),
        sa.Column("may_approximate", sa.Boolean(), nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("id", name="pk_workspaces"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("scope", sa.String(16), nullable=False, server_default="inference"),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("replaces", sa.String(32), nullable=True),
        sa.Column("auto_cache", sa.String(16), nullable=True),
        sa.Column("auto_cache_ttl", sa.String(4), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_api_keys_workspace_id_workspaces"
        ),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
        sa.UniqueConstraint("replaces", name="uq_api_keys_replaces"),
    )
    op.create_table(
        "shared_limits",
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("workspace_id", name="pk_shared_limits"),
    )
    op.create_table(
        "watermarks",
        sa.Column("name", sa.String(32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_watermarks"),
    )


def _create_turns() -> None:
    op.create_table(
        "turns",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("instance", sa.String(32), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("engine", sa.String(64), nullable=True),
        sa.Column("engine_model", sa.String(256), nullable=True),
        sa.Column("epoch", sa.String(64), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("opened_ms", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("miss_reason", sa.String(32), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_30m_tokens", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("automatic_tokens", sa.BigInteger(), nullable=False),
        sa.Column("computed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("thinking_tokens", sa.BigInteger(), nullable=False),
        sa.Column("first_token_seconds", sa.Double(), nullable=True),
        sa.Column("duration_seconds", sa.Double(), nullable=True),
        sa.Column("price", sa.String(96), nullable=True),
        sa.Column("cost_nano", sa.BigInteger(), nullable=True),
        sa.Column("cost_without_cache_nano", sa.BigInteger(), nullable=True),
        sa.Column("num_removed", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=True),
        sa.Column("dialect", sa.String(16), nullable=True),
        sa.Column("prefix", sa.String(16), nullable=True),
        sa.Column("prefix_ttl", sa.String(8), nullable=True),
        sa.Column("stop_reason", sa.String(32), nullable=True),
        sa.Column("queue_seconds", sa.Double(), nullable=True),
        sa.Column("prefill_seconds", sa.Double(), nullable=True),
        sa.Column("decode_seconds", sa.Double(), nullable=True),
        sa.Column("available_tokens", sa.BigInteger(), nullable=True),
        sa.Column("captured_tokens", sa.BigInteger(), nullable=True),
        sa.Column("http_request_id", sa.String(40), nullable=True),
        sa.Column("user_agent", sa.String(64), nullable=True),
        sa.Column("name", sa.String(64), nullable=True),
        sa.Column("status", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.String(300), nullable=True),
        sa.Column("approximate", sa.String(64), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_turns"),
    )


def _index_turns() -> None:
    op.create_index("ix_turns_engine", "turns", ["engine", "opened_ms", "id"])
    op.create_index(
        "ix_turns_errors",
        "turns",
        ["opened_ms", "id"],
        sqlite_where=sa.text("outcome LIKE '%error'"),
        postgresql_where=sa.text("outcome LIKE '%error'"),
    )
    op.create_index("ix_turns_http_request_id", "turns", ["http_request_id"])
    op.create_index("ix_turns_miss_reason", "turns", ["miss_reason", "opened_ms", "id"])
    op.create_index("ix_turns_opened", "turns", ["opened_ms", "id"])
    op.create_index("ix_turns_outcome", "turns", ["outcome", "opened_ms", "id"])
    op.create_index("ix_turns_prefix", "turns", ["prefix", "opened_ms", "id"])
    op.create_index("ix_turns_workspace_opened", "turns", ["workspace_id", "opened_ms", "id"])


def _create_rollups() -> None:
    op.create_table(
        "turn_rollups",
        sa.Column("by_engine", sa.BigInteger(), nullable=False),
        sa.Column("width_seconds", sa.BigInteger(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("price", sa.String(96), nullable=False),
        sa.Column("prompt_above", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("requests_with_read", sa.BigInteger(), nullable=False),
        sa.Column("errors", sa.BigInteger(), nullable=False),
        sa.Column("unpriced", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_30m_tokens", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("automatic_tokens", sa.BigInteger(), nullable=False),
        sa.Column("automatic_input_tokens", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("computed_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("thinking_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.Column("cost_without_cache_nano", sa.BigInteger(), nullable=False),
        sa.Column("prefill_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefill_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "by_engine",
            "width_seconds",
            "start_ms",
            "workspace_id",
            "key_id",
            "engine",
            "model",
            "price",
            "prompt_above",
            name="pk_turn_rollups",
        ),
    )
    op.create_table(
        "reason_rollups",
        sa.Column("by_engine", sa.BigInteger(), nullable=False),
        sa.Column("width_seconds", sa.BigInteger(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("value", sa.String(32), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "by_engine",
            "width_seconds",
            "start_ms",
            "workspace_id",
            "engine",
            "model",
            "kind",
            "value",
            name="pk_reason_rollups",
        ),
    )
    op.create_table(
        "latency_rollups",
        sa.Column("by_engine", sa.BigInteger(), nullable=False),
        sa.Column("width_seconds", sa.BigInteger(), nullable=False),
        sa.Column("start_ms", sa.BigInteger(), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("prompt_bucket", sa.BigInteger(), nullable=False),
        sa.Column("has_read", sa.BigInteger(), nullable=False),
        sa.Column("bin", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "by_engine",
            "width_seconds",
            "start_ms",
            "workspace_id",
            "engine",
            "model",
            "prompt_bucket",
            "has_read",
            "bin",
            name="pk_latency_rollups",
        ),
    )


def _create_whole_lives() -> None:
    op.create_table(
        "prefixes",
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("ttl", sa.String(8), nullable=True),
        sa.Column("price", sa.String(96), nullable=True),
        sa.Column("first_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_ms", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("requests_with_read", sa.BigInteger(), nullable=False),
        sa.Column("unpriced", sa.BigInteger(), nullable=False),
        sa.Column("cache_read_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_30m_tokens", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("cache_write_1h_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.Column("cost_without_cache_nano", sa.BigInteger(), nullable=False),
        sa.Column("gaps_5m", sa.BigInteger(), nullable=False),
        sa.Column("gaps_1h", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("workspace_id", "prefix", name="pk_prefixes"),
    )
    op.create_index(
        "ix_prefixes_reused",
        "prefixes",
        ["workspace_id", "requests", "prefix"],
        sqlite_where=sa.text("requests > 1"),
        postgresql_where=sa.text("requests > 1"),
    )
    op.create_table(
        "engine_epochs",
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("epoch", sa.String(64), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("first_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "epoch", "model", name="pk_engine_epochs"),
    )
    op.create_table(
        "horizon",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("turns_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_horizon"),
    )


def _create_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(40), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("version", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_initiated_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("owner", sa.String(32), nullable=False),
        sa.Column("owned_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_status", "batches", ["status", "owned_until"])
    op.create_index("ix_batches_workspace", "batches", ["workspace_id", "created_at", "id"])
    op.create_table(
        "batch_rows",
        sa.Column("batch_id", sa.String(40), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("custom_id", sa.String(64), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("params", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "position", name="pk_batch_rows"),
    )
    op.create_index("ix_batch_rows_rank", "batch_rows", ["batch_id", "status", "rank"])


def _create_kept() -> None:
    op.create_table(
        "cached_contents",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("display_name", sa.String(128), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("held_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_cached_contents"),
    )
    op.create_index("ix_cached_contents_expires", "cached_contents", ["expires_at"])
    op.create_index("ix_cached_contents_workspace", "cached_contents", ["workspace_id", "id"])
    op.create_table(
        "turn_contents",
        sa.Column("turn_id", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("turn_id", name="pk_turn_contents"),
    )
    op.create_index("ix_turn_contents_workspace", "turn_contents", ["workspace_id", "at_ms"])
    op.create_table(
        "kept_responses",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kept_responses"),
    )
    op.create_index("ix_kept_responses_workspace", "kept_responses", ["workspace_id", "at_ms"])
