"""The whole schema."""

import re
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
# Tables with their columns `name:kind`. A text's kind is its length; `*` is a part of the primary
# key, `?` may be null, `=` has a default.
_TABLES = """
batch_rows: batch_id*:40 position*:int custom_id:64 rank:int prefix:16 params:bytes status:16
    result:bytes?
batches: id*:40 workspace_id:64 key_id:32 version:16 status:16 num_bytes:int created_at:time
    expires_at:time ended_at:time? cancel_initiated_at:time? owner:32 owned_until:time
cached_contents: id*:32 workspace_id:64 model:256 display_name:128 body:bytes num_bytes:int
    num_tokens:int prefix:16 created_at:time updated_at:time expires_at:time held_until:time
engine_epochs: engine*:64 epoch*:64 model*:128 first_ms:int last_ms:int
horizon: id*:int turns_ms:int
latency_rollups: by_engine*:int width_seconds*:int start_ms*:int workspace_id*:64 engine*:64
    model*:128 prompt_bucket*:int has_read*:int bin*:int requests:int
prefixes: workspace_id*:64 prefix*:16 model:128 ttl:8? price:96? first_ms:int last_ms:int
    requests:int requests_with_read:int unpriced:int cache_read_tokens:int cache_write_5m_tokens:int
    cache_write_30m_tokens:int=0 cache_write_1h_tokens:int cost_nano:int cost_without_cache_nano:int
    gaps_5m:int gaps_1h:int
reason_rollups: by_engine*:int width_seconds*:int start_ms*:int workspace_id*:64 engine*:64
    model*:128 kind*:8 value*:32 requests:int
turn_rollups: by_engine*:int width_seconds*:int start_ms*:int workspace_id*:64 key_id*:32 engine*:64
    model*:128 price*:96 prompt_above*:int requests:int requests_with_read:int errors:int
    unpriced:int input_tokens:int cache_read_tokens:int cache_write_5m_tokens:int
    cache_write_30m_tokens:int=0 cache_write_1h_tokens:int automatic_tokens:int
    automatic_input_tokens:int=0 computed_tokens:int output_tokens:int thinking_tokens:int
    cost_nano:int cost_without_cache_nano:int prefill_tokens:int prefill_us:int
turns: id*:64 instance:32 workspace_id:64 key_id:32 model:128 engine:64? engine_model:256? epoch:64?
    stream:bool opened_at:time opened_ms:int outcome:32 miss_reason:32? input_tokens:int
    cache_read_tokens:int cache_write_5m_tokens:int cache_write_30m_tokens:int=0
    cache_write_1h_tokens:int automatic_tokens:int computed_tokens:int output_tokens:int
    thinking_tokens:int first_token_seconds:real? duration_seconds:real? price:96? cost_nano:int?
    cost_without_cache_nano:int? num_removed:int=0 fingerprint:bytes? dialect:16? prefix:16?
    prefix_ttl:8? stop_reason:32? queue_seconds:real? prefill_seconds:real? decode_seconds:real?
    available_tokens:int? captured_tokens:int? http_request_id:40? user_agent:64? name:64?
    status:int? error:300? approximate:64?
watermarks: name*:32 value:int
workspaces: id*:64 created_at:time display_name:128= archived_at:time? requests_per_minute:int?
    tokens_per_minute:int? max_concurrency:int? monthly_spend_nano:int? lease_share:real?
    auto_cache:16? auto_cache_ttl:4? keep_days:int? may_approximate:bool=0
kept_responses: id*:64 workspace_id:64 at_ms:int body:bytes
shared_limits: workspace_id*:64 state:text
turn_contents: turn_id*:64 workspace_id:64 at_ms:int body:bytes
api_keys: id*:32 workspace_id:64 name:64 digest:64 created_at:time revoked_at:time?
    scope:16=inference expires_at:time? last_used_at:time? replaces:32? auto_cache:16?
    auto_cache_ttl:4?
"""
# The index's name behind `ix_`, its table and its columns; and what rows it has, where not all.
_INDICES = """
batch_rows_rank batch_rows batch_id status rank
batches_status batches status owned_until
batches_workspace batches workspace_id created_at id
cached_contents_expires cached_contents expires_at
cached_contents_workspace cached_contents workspace_id id
prefixes_reused prefixes workspace_id requests prefix
turns_engine turns engine opened_ms id
turns_errors turns opened_ms id
turns_http_request_id turns http_request_id
turns_miss_reason turns miss_reason opened_ms id
turns_opened turns opened_ms id
turns_outcome turns outcome opened_ms id
turns_prefix turns prefix opened_ms id
turns_workspace_opened turns workspace_id opened_ms id
kept_responses_workspace kept_responses workspace_id at_ms
turn_contents_workspace turn_contents workspace_id at_ms
"""
_WHERE = {"prefixes_reused": "requests > 1", "turns_errors": "outcome LIKE '%error'"}
_CONSTRAINTS: dict[str, list[Any]] = {
    "api_keys": [
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_api_keys_workspace_id_workspaces"
        ),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
        sa.UniqueConstraint("replaces", name="uq_api_keys_replaces"),
    ]
}


def _tables() -> dict[str, list[str]]:
    """The columns of each table."""
    blocks = (block.split(":", 1) for block in re.split(r"\n(?! )", _TABLES.strip()))
    return {table: columns.split() for table, columns in blocks}


def upgrade() -> None:
    for table, columns in _tables().items():
        made = []
        for column in columns:
            name, _, rest = column.partition(":")
            rest, has_default, default = rest.partition("=")
            kind, is_key = rest.removesuffix("?"), name.endswith("*")
            options: dict[str, Any] = {"server_default": default} if has_default else {}
            if kind == "int" and is_key:
                options["autoincrement"] = False
            of_kind = _KINDS[kind] if kind in _KINDS else sa.String(length=int(kind))
            options |= {"nullable": rest.endswith("?"), "primary_key": is_key}
            made.append(sa.Column(name.removesuffix("*"), of_kind, **options))
        keys = [column.name for column in made if column.primary_key]
        primary = sa.PrimaryKeyConstraint(*keys, name=f"pk_{table}")
        op.create_table(table, *made, primary, *_CONSTRAINTS.get(table, ()))
    for line in _INDICES.strip().splitlines():
        name, table, *columns = line.split()
        where = sa.text(_WHERE[name]) if name in _WHERE else None
        op.create_index(f"ix_{name}", table, columns, sqlite_where=where, postgresql_where=where)
    watermarks = sa.table("watermarks", sa.column("name"), sa.column("value"))
    op.bulk_insert(watermarks, [{"name": "access", "value": 0}])


def downgrade() -> None:
    for table in reversed(_tables()):
        op.drop_table(table)
