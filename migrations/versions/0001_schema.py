"""The whole schema."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_KINDS: dict[str, Any] = {
    "int": sa.BigInteger(),
    "real": sa.Double(),
    "bool": sa.Boolean(),
    "bytes": sa.LargeBinary(),
    "time": sa.DateTime(timezone=True),
    "text": sa.Text(),
}


def _create(table: str, key: str, columns: str, *constraints: Any) -> None:
    """Columns are `name:kind`, a text's kind its length; `?` may be null, `=` has a default."""
    made = []
    for column in columns.split():
        name, _, rest = column.partition(":")
        rest, has_default, default = rest.partition("=")
        kind = rest.removesuffix("?")
        options: dict[str, Any] = {"server_default": default} if has_default else {}
        if kind == "int" and name in key.split():
            options["autoincrement"] = False
        of_kind = _KINDS[kind] if kind in _KINDS else sa.String(length=int(kind))
        made.append(sa.Column(name, of_kind, nullable=rest.endswith("?"), **options))
    primary = sa.PrimaryKeyConstraint(*key.split(), name=f"pk_{table}")
    op.create_table(table, *made, *constraints[:1], primary, *constraints[1:])


def upgrade() -> None:
    _create(
        "batch_rows",
        "batch_id position",
        """
        batch_id:40 position:int custom_id:64 rank:int prefix:16 params:bytes status:16
        result:bytes?
        """,
    )
    op.create_index("ix_batch_rows_rank", "batch_rows", ["batch_id", "status", "rank"])
    _create(
        "batches",
        "id",
        """
        id:40 workspace_id:64 key_id:32 version:16 status:16 num_bytes:int created_at:time
        expires_at:time ended_at:time? cancel_initiated_at:time? owner:32 owned_until:time
        """,
    )
    op.create_index("ix_batches_status", "batches", ["status", "owned_until"])
    op.create_index("ix_batches_workspace", "batches", ["workspace_id", "created_at", "id"])
    _create(
        "cached_contents",
        "id",
        """
        id:32 workspace_id:64 model:256 display_name:128 body:bytes num_bytes:int num_tokens:int
        prefix:16 created_at:time updated_at:time expires_at:time held_until:time
        """,
    )
    op.create_index("ix_cached_contents_expires", "cached_contents", ["expires_at"])
    op.create_index("ix_cached_contents_workspace", "cached_contents", ["workspace_id", "id"])
    _create(
        "engine_epochs",
        "engine epoch model",
        "engine:64 epoch:64 model:128 first_ms:int last_ms:int",
    )
    _create(
        "horizon",
        "id",
        """
        id:int turns_ms:int
        """,
    )
    _create(
        "latency_rollups",
        "by_engine width_seconds start_ms workspace_id engine model prompt_bucket has_read bin",
        """
        by_engine:int width_seconds:int start_ms:int workspace_id:64 engine:64 model:128
        prompt_bucket:int has_read:int bin:int requests:int
        """,
    )
    _create(
        "prefixes",
        "workspace_id prefix",
        """
        workspace_id:64 prefix:16 model:128 ttl:8? price:96? first_ms:int last_ms:int requests:int
        requests_with_read:int unpriced:int cache_read_tokens:int cache_write_5m_tokens:int
        cache_write_30m_tokens:int=0 cache_write_1h_tokens:int
        cost_nano:int cost_without_cache_nano:int gaps_5m:int gaps_1h:int
        """,
    )
    op.create_index(
        "ix_prefixes_reused",
        "prefixes",
        ["workspace_id", "requests", "prefix"],
        sqlite_where=sa.text("requests > 1"),
        postgresql_where=sa.text("requests > 1"),
    )
    _create(
        "reason_rollups",
        "by_engine width_seconds start_ms workspace_id engine model kind value",
        """
        by_engine:int width_seconds:int start_ms:int workspace_id:64 engine:64 model:128 kind:8
        value:32 requests:int
        """,
    )
    _create(
        "turn_rollups",
        "by_engine width_seconds start_ms workspace_id key_id engine model price prompt_above",
        """
        by_engine:int width_seconds:int start_ms:int workspace_id:64 key_id:32 engine:64 model:128
        price:96 prompt_above:int requests:int requests_with_read:int errors:int unpriced:int
        input_tokens:int cache_read_tokens:int cache_write_5m_tokens:int
        cache_write_30m_tokens:int=0 cache_write_1h_tokens:int
        automatic_tokens:int automatic_input_tokens:int=0 computed_tokens:int output_tokens:int
        thinking_tokens:int cost_nano:int cost_without_cache_nano:int prefill_tokens:int
        prefill_us:int
        """,
    )
    _create(
        "turns",
        "id",
        """
        id:64 instance:32 workspace_id:64 key_id:32 model:128 engine:64? engine_model:256? epoch:64?
        stream:bool opened_at:time opened_ms:int outcome:32 miss_reason:32? input_tokens:int
        cache_read_tokens:int cache_write_5m_tokens:int
        cache_write_30m_tokens:int=0 cache_write_1h_tokens:int
        automatic_tokens:int computed_tokens:int output_tokens:int thinking_tokens:int
        first_token_seconds:real? duration_seconds:real? price:96? cost_nano:int?
        cost_without_cache_nano:int? num_removed:int=0 fingerprint:bytes? dialect:16? prefix:16?
        prefix_ttl:8? stop_reason:32? queue_seconds:real? prefill_seconds:real? decode_seconds:real?
        available_tokens:int? captured_tokens:int? http_request_id:40? user_agent:64? name:64?
        status:int? error:300? approximate:64?
        """,
    )
    op.create_index("ix_turns_engine", "turns", ["engine", "opened_ms", "id"])
    is_error = sa.text("outcome LIKE '%error'")
    op.create_index(
        "ix_turns_errors",
        "turns",
        ["opened_ms", "id"],
        sqlite_where=is_error,
        postgresql_where=is_error,
    )
    op.create_index("ix_turns_http_request_id", "turns", ["http_request_id"])
    op.create_index("ix_turns_miss_reason", "turns", ["miss_reason", "opened_ms", "id"])
    op.create_index("ix_turns_opened", "turns", ["opened_ms", "id"])
    op.create_index("ix_turns_outcome", "turns", ["outcome", "opened_ms", "id"])
    op.create_index("ix_turns_prefix", "turns", ["prefix", "opened_ms", "id"])
    op.create_index("ix_turns_workspace_opened", "turns", ["workspace_id", "opened_ms", "id"])
    _create(
        "watermarks",
        "name",
        """
        name:32 value:int
        """,
    )
    _create(
        "workspaces",
        "id",
        """
        id:64 created_at:time display_name:128= archived_at:time? requests_per_minute:int?
        tokens_per_minute:int? max_concurrency:int? monthly_spend_nano:int? lease_share:real?
        auto_cache:16? auto_cache_ttl:4? keep_days:int? may_approximate:bool=0
        """,
    )
    _create("kept_responses", "id", "id:64 workspace_id:64 at_ms:int body:bytes")
    op.create_index("ix_kept_responses_workspace", "kept_responses", ["workspace_id", "at_ms"])
    _create("shared_limits", "workspace_id", "workspace_id:64 state:text")
    _create("turn_contents", "turn_id", "turn_id:64 workspace_id:64 at_ms:int body:bytes")
    op.create_index("ix_turn_contents_workspace", "turn_contents", ["workspace_id", "at_ms"])
    _create(
        "api_keys",
        "id",
        """
        id:32 workspace_id:64 name:64 digest:64 created_at:time revoked_at:time? scope:16=inference
        expires_at:time? last_used_at:time? replaces:32? auto_cache:16? auto_cache_ttl:4?
        """,
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_api_keys_workspace_id_workspaces"
        ),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
        sa.UniqueConstraint("replaces", name="uq_api_keys_replaces"),
    )
    watermarks = sa.table("watermarks", sa.column("name"), sa.column("value"))
    op.bulk_insert(watermarks, [{"name": "access", "value": 0}])


def downgrade() -> None:
    for table in (
        "api_keys",
        "turn_contents",
        "kept_responses",
        "shared_limits",
        "workspaces",
        "watermarks",
        "turns",
        "turn_rollups",
        "reason_rollups",
        "prefixes",
        "latency_rollups",
        "horizon",
        "engine_epochs",
        "cached_contents",
        "batches",
        "batch_rows",
    ):
        op.drop_table(table)
