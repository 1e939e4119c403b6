"""The tables. Times are aware UTC, money is integer nano-dollars, tokens are integers."""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from gateway.base.record import MODEL_CHARACTERS

REVISION = "0013"
"""The revision of these tables. Each new one in `migrations/versions` moves it."""

NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(sa.TypeDecorator[datetime]):
    """Refuses naive values, and returns aware ones on every database."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("naive datetime")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    metadata = sa.MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {datetime: UtcDateTime(), int: sa.BigInteger(), float: sa.Double()}  # noqa: RUF012


class WorkspaceRow(Base):
    """One workspace. `gateway/base/grants.py` says what each limit counts; NULL is no limit."""

    __tablename__ = "workspaces"

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    created_at: Mapped[datetime]
    display_name: Mapped[str] = mapped_column(sa.String(128), server_default="")
    archived_at: Mapped[datetime | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    max_concurrency: Mapped[int | None]
    monthly_spend_nano: Mapped[int | None]
    lease_share: Mapped[float | None]
    # `grants.py` explains these too. NULL is the installation's setting.
    auto_cache: Mapped[str | None] = mapped_column(sa.String(16))
    auto_cache_ttl: Mapped[str | None] = mapped_column(sa.String(4))
    # How many days prompts and answers are stored; NULL stores none.
    keep_days: Mapped[int | None]
    may_approximate: Mapped[bool] = mapped_column(server_default="0")


class SharedLimitsRow(Base):
    """What gateways tell each other of a workspace's limits, as JSON (`admission/shared.py`)."""

    __tablename__ = "shared_limits"

    workspace_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    state: Mapped[str] = mapped_column(sa.Text)


class ApiKeyRow(Base):
    """One key. The key itself is stored nowhere."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(sa.ForeignKey("workspaces.id"))
    name: Mapped[str] = mapped_column(sa.String(64))
    # The SHA-256 of the key.
    digest: Mapped[str] = mapped_column(sa.String(64), unique=True)
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    scope: Mapped[str] = mapped_column(sa.String(16), server_default="inference")
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    # The key that a rotation replaced by this one. Each key is replaced at most once.
    replaces: Mapped[str | None] = mapped_column(sa.String(32), unique=True)
    auto_cache: Mapped[str | None] = mapped_column(sa.String(16))
    auto_cache_ttl: Mapped[str | None] = mapped_column(sa.String(4))


class WatermarkRow(Base):
    """One number by its name.

    - `access` grows with every change of keys and workspaces. Gateways then read them anew.
    - `sample` marks a database of sample data. Its value is when it was filled, in Unix ms.
    - `master` and `unsealed` are those of `sealed.py`.
    """

    __tablename__ = "watermarks"

    name: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    value: Mapped[int]


class CacheColumns:
    """The columns of `CacheUsage`."""

    cache_read_tokens: Mapped[int]
    cache_write_5m_tokens: Mapped[int]
    cache_write_30m_tokens: Mapped[int] = mapped_column(server_default="0")
    cache_write_1h_tokens: Mapped[int]
    cache_write_12h_tokens: Mapped[int] = mapped_column(server_default="0")


IS_ERROR = "outcome LIKE '%error'"
"""The condition of turns that ended in an error, as `is_error` in `structs/usage.py`. A query must
have these very words: the index is used for no others."""
IS_SAMPLED = "substr(id, 31) = '00'"
"""The condition of one turn in 256, by the random end of its id. A sample takes these turns first,
so the sample of a large range is found among few. It has an index in the same way."""


def ended_in_error() -> sa.ColumnElement[bool]:
    """IS_ERROR, for a query of turns."""
    return sa.text(IS_ERROR)  # type: ignore[return-value]


class TurnRow(CacheColumns, Base):
    """One closed turn. `TurnRecord` explains the fields that it has too."""

    __tablename__ = "turns"
    __table_args__ = (
        # The order of the turn explorer, which pages by (opened_ms, id).
        sa.Index("ix_turns_opened", "opened_ms", "id"),
        sa.Index("ix_turns_workspace_opened", "workspace_id", "opened_ms", "id"),
        # A turn's neighbours of the same prefix; the name is keyed by the workspace's scope.
        sa.Index("ix_turns_prefix", "prefix", "opened_ms", "id"),
        sa.Index("ix_turns_outcome", "outcome", "opened_ms", "id"),
        sa.Index("ix_turns_miss_reason", "miss_reason", "opened_ms", "id"),
        sa.Index("ix_turns_http_request_id", "http_request_id"),
        sa.Index("ix_turns_engine", "engine", "opened_ms", "id"),
        # Few turns end in an error, and the explorer asks for the newest.
        sa.Index(
            "ix_turns_errors",
            "opened_ms",
            "id",
            sqlite_where=sa.text(IS_ERROR),
            postgresql_where=sa.text(IS_ERROR),
        ),
        sa.Index(
            "ix_turns_sampled",
            "opened_ms",
            "id",
            sqlite_where=sa.text(IS_SAMPLED),
            postgresql_where=sa.text(IS_SAMPLED),
        ),
    )

    id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    instance: Mapped[str] = mapped_column(sa.String(32))
    workspace_id: Mapped[str] = mapped_column(sa.String(64))
    key_id: Mapped[str] = mapped_column(sa.String(32))
    model: Mapped[str] = mapped_column(sa.String(MODEL_CHARACTERS))
    engine: Mapped[str | None] = mapped_column(sa.String(64))
    engine_model: Mapped[str | None] = mapped_column(sa.String(256))
    epoch: Mapped[str | None] = mapped_column(sa.String(64))
    stream: Mapped[bool]
    opened_at: Mapped[datetime]
    # `opened_at` in Unix ms, for intervals.
    opened_ms: Mapped[int]
    outcome: Mapped[str] = mapped_column(sa.String(32))
    miss_reason: Mapped[str | None] = mapped_column(sa.String(32))
    input_tokens: Mapped[int]
    automatic_tokens: Mapped[int]
    computed_tokens: Mapped[int]
    output_tokens: Mapped[int]
    thinking_tokens: Mapped[int]
    first_token_seconds: Mapped[float | None]
    duration_seconds: Mapped[float | None]
    # The id of the price sheet, with its version (`name@date`).
    price: Mapped[str | None] = mapped_column(sa.String(96))
    cost_nano: Mapped[int | None]
    cost_without_cache_nano: Mapped[int | None]
    num_removed: Mapped[int] = mapped_column(server_default="0")
    # This column and `prefix` have only keyed digests.
    fingerprint: Mapped[bytes | None] = mapped_column(sa.LargeBinary)
    dialect: Mapped[str | None] = mapped_column(sa.String(16))
    prefix: Mapped[str | None] = mapped_column(sa.String(16))
    prefix_ttl: Mapped[str | None] = mapped_column(sa.String(8))
    stop_reason: Mapped[str | None] = mapped_column(sa.String(32))
    queue_seconds: Mapped[float | None]
    prefill_seconds: Mapped[float | None]
    decode_seconds: Mapped[float | None]
    available_tokens: Mapped[int | None]
    captured_tokens: Mapped[int | None]
    http_request_id: Mapped[str | None] = mapped_column(sa.String(40))
    user_agent: Mapped[str | None] = mapped_column(sa.String(64))
    name: Mapped[str | None] = mapped_column(sa.String(64))
    status: Mapped[int | None]
    error: Mapped[str | None] = mapped_column(sa.String(300))
    approximate: Mapped[str | None] = mapped_column(sa.String(64))
    # The row's checksum (`checksums.py`). NULL in rows from before revision 0005.
    checksum: Mapped[int | None]
    content: Mapped[str | None] = mapped_column(sa.String(16))
    # `TurnMark`s. NULL in rows from before revision 0009, and where an engine did not report them.
    marks: Mapped[list[dict[str, Any]] | None] = mapped_column(sa.JSON(none_as_null=True))


class IntervalColumns:
    """The keys of sums over the turns that began in one interval. `rollups.py` defines the sums."""

    # 0: the sum is over all engines, and `engine` is empty. 1: the sum is over all keys, and an
    # empty `engine` stands for turns without an engine.
    by_engine: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, sort_order=-1)
    width_seconds: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, sort_order=-1)
    start_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, sort_order=-1)
    workspace_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True, sort_order=-1)
    engine: Mapped[str] = mapped_column(sa.String(64), primary_key=True, sort_order=-1)
    model: Mapped[str] = mapped_column(sa.String(128), primary_key=True, sort_order=-1)


class TurnRollupRow(IntervalColumns, CacheColumns, Base):
    """Sums by all dimensions. `price` is empty for turns without a price."""

    __tablename__ = "turn_rollups"

    key_id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    price: Mapped[str] = mapped_column(sa.String(96), primary_key=True)
    prompt_above: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    requests: Mapped[int]
    requests_with_read: Mapped[int]
    errors: Mapped[int]
    unpriced: Mapped[int]
    input_tokens: Mapped[int]
    automatic_tokens: Mapped[int]
    automatic_input_tokens: Mapped[int] = mapped_column(server_default="0")
    computed_tokens: Mapped[int]
    output_tokens: Mapped[int]
    thinking_tokens: Mapped[int]
    cost_nano: Mapped[int]
    cost_without_cache_nano: Mapped[int]
    prefill_tokens: Mapped[int]
    prefill_us: Mapped[int]


class ReasonRollupRow(IntervalColumns, Base):
    """How many turns of one interval had each `value` of a kind of reasons.

    The kinds are: `miss`, the miss reason of turns without a read; `part`, that of turns with one;
    `outcome`; `mark1` and so on, the reason of the first marker to the last one. `mixed` is `miss`
    and `part` together: revision 0009 met sums whose turns were deleted already.
    """

    __tablename__ = "reason_rollups"

    kind: Mapped[str] = mapped_column(sa.String(8), primary_key=True)
    value: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    requests: Mapped[int]


class LatencyRollupRow(IntervalColumns, Base):
    """A histogram of one interval's times to first token."""

    __tablename__ = "latency_rollups"

    # How many of `rollups.PROMPT_EDGES` are below the prompt's tokens.
    prompt_bucket: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # 1 for turns that read from a cache.
    has_read: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # The bin of the time to first token (`rollups.ttft_bin`).
    bin: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    requests: Mapped[int]


class PrefixRow(CacheColumns, Base):
    """One marked prefix, over its whole life in the ledger and all models."""

    __tablename__ = "prefixes"
    # The index of prefixes that were sent more than once, for the pages. Most prefixes of growing
    # conversations are sent once.
    __table_args__ = (
        sa.Index(
            "ix_prefixes_reused",
            "workspace_id",
            "requests",
            "prefix",
            sqlite_where=sa.text("requests > 1"),
            postgresql_where=sa.text("requests > 1"),
        ),
    )

    workspace_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    prefix: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    # The last and the first of its models in the order of names: equal where it has one.
    model: Mapped[str] = mapped_column(sa.String(128))
    least_model: Mapped[str | None] = mapped_column(sa.String(128))
    ttl: Mapped[str | None] = mapped_column(sa.String(8))
    price: Mapped[str | None] = mapped_column(sa.String(96))
    first_ms: Mapped[int]
    last_ms: Mapped[int]
    requests: Mapped[int]
    requests_with_read: Mapped[int]
    unpriced: Mapped[int]
    cost_nano: Mapped[int]
    cost_without_cache_nano: Mapped[int]
    # How many of its turns came at most five minutes after the one before, and how many later but
    # within an hour.
    gaps_5m: Mapped[int]
    gaps_1h: Mapped[int]


class EpochRow(Base):
    """When an engine's first and last turn of one epoch began, for one model."""

    __tablename__ = "engine_epochs"

    engine: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    epoch: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    model: Mapped[str] = mapped_column(sa.String(MODEL_CHARACTERS), primary_key=True)
    first_ms: Mapped[int]
    last_ms: Mapped[int]


class ModelIdRow(Base):
    """The model that an id belongs to.

    An adapter's id ends with its name. The id `*` stands for requests that name no model.
    """

    __tablename__ = "model_ids"

    id: Mapped[str] = mapped_column(sa.String(MODEL_CHARACTERS), primary_key=True)
    # The name that the model's engine gave it first.
    engine_model: Mapped[str] = mapped_column(sa.String(256))
    # Everything that engines reported about the model, as JSON.
    identity: Mapped[str] = mapped_column(sa.Text)
    since: Mapped[datetime]


class EpochReportRow(Base):
    """The largest counts that an engine reported of one epoch. The fields are `EpochReport`'s."""

    __tablename__ = "epoch_reports"

    engine: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    epoch: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    model: Mapped[str] = mapped_column(sa.String(256))
    device: Mapped[str] = mapped_column(sa.String(128))
    kind: Mapped[str] = mapped_column(sa.String(256))
    first_ms: Mapped[int]
    # When the engine last answered.
    last_ms: Mapped[int]
    silent_ms: Mapped[int | None]
    granted: Mapped[int]
    expired: Mapped[int]
    sacrificed: Mapped[int]
    yielded: Mapped[int]
    dropped: Mapped[int]
    released: Mapped[int] = mapped_column(server_default="0")
    damaged: Mapped[int]
    restored_leases: Mapped[int]
    lost_leases: Mapped[int]
    # `PrefillSums` as JSON.
    prefill_times: Mapped[str | None] = mapped_column(sa.Text)


class LeaseEndRow(Base):
    """How many leases of an engine ended in one interval for one reason (`LEASE_ENDS`).

    The leases that ended with the engine itself are in no row: `reads/leases.py` finds them.
    """

    __tablename__ = "lease_ends"

    width_seconds: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    start_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    engine: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    reason: Mapped[str] = mapped_column(sa.String(16), primary_key=True)
    leases: Mapped[int]


class RefusalRow(Base):
    """How many requests one run of a gateway refused before they were turns, by minute, key and
    reason (`refusals.py`)."""

    __tablename__ = "refusals"

    minute_ms: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    workspace_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    key_id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    reason: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    gateway: Mapped[str] = mapped_column(sa.String(8), primary_key=True)
    requests: Mapped[int]


class PendingPurgeRow(Base):
    """A purge that an engine still has to do (`structs.fleet.PendingPurge`)."""

    __tablename__ = "pending_purges"

    engine: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    # Hexadecimal; empty for everybody's content, as is the workspace then.
    scope: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(sa.String(64))
    asked_ms: Mapped[int]


class HorizonRow(Base):
    """One row. Turns that began before `turns_ms` may have been deleted; their sums are kept."""

    __tablename__ = "horizon"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    turns_ms: Mapped[int]


class TurnContentRow(Base):
    """The prompt and the answer of a turn that began at `at_ms`, compressed and encrypted
    (`contents.py`). Only workspaces with `keep_days` have any."""

    __tablename__ = "turn_contents"
    __table_args__ = (sa.Index("ix_turn_contents_workspace", "workspace_id", "at_ms"),)

    turn_id: Mapped[str] = mapped_column(sa.String(64), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(sa.String(64))
    at_ms: Mapped[int]
    body: Mapped[bytes] = mapped_column(sa.LargeBinary)


class KeptResponseRow(Base):
    """A response of the Responses API with its input, or a conversation. As `TurnContentRow`."""

    __tablename__ = "kept_responses"
    __table_args__ = (sa.Index("ix_kept_responses_workspace", "workspace_id", "at_ms"),)

    turn_id: Mapped[str] = mapped_column("id", sa.String(64), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(sa.String(64))
    at_ms: Mapped[int]
    body: Mapped[bytes] = mapped_column(sa.LargeBinary)


class CachedContentRow(Base):
    """A prompt that a client named, to be held until `expires_at`."""

    __tablename__ = "cached_contents"
    __table_args__ = (
        sa.Index("ix_cached_contents_workspace", "workspace_id", "id"),
        sa.Index("ix_cached_contents_expires", "expires_at"),
    )

    id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(sa.String(64))
    model: Mapped[str] = mapped_column(sa.String(256))
    display_name: Mapped[str] = mapped_column(sa.String(128))
    # The request's JSON, compressed and encrypted (`sealed.py`).
    body: Mapped[bytes] = mapped_column(sa.LargeBinary)
    # The bytes of the prompt.
    num_bytes: Mapped[int]
    # The tokens of the prompt.
    num_tokens: Mapped[int]
    # The prompt's name, keyed by the workspace's scope.
    prefix: Mapped[str] = mapped_column(sa.String(16))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    # Until when engines were asked to hold it.
    held_until: Mapped[datetime]


class BatchRow(Base):
    """A batch of messages."""

    __tablename__ = "batches"
    __table_args__ = (
        sa.Index("ix_batches_workspace", "workspace_id", "created_at", "id"),
        sa.Index("ix_batches_status", "status", "owned_until"),
    )

    id: Mapped[str] = mapped_column(sa.String(40), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(sa.String(64))
    key_id: Mapped[str] = mapped_column(sa.String(32))
    # The `anthropic-version` of its request.
    version: Mapped[str] = mapped_column(sa.String(16))
    status: Mapped[str] = mapped_column(sa.String(16))
    # The bytes of its rows.
    num_bytes: Mapped[int]
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    cancel_initiated_at: Mapped[datetime | None]
    # The gateway that runs it, until `owned_until`.
    owner: Mapped[str] = mapped_column(sa.String(32))
    owned_until: Mapped[datetime]


class BatchItemRow(Base):
    """One request of a batch."""

    __tablename__ = "batch_rows"
    __table_args__ = (sa.Index("ix_batch_rows_rank", "batch_id", "status", "rank"),)

    batch_id: Mapped[str] = mapped_column(sa.String(40), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    custom_id: Mapped[str] = mapped_column(sa.String(64))
    # Rows run in this order.
    rank: Mapped[int]
    # The name of what the rows share.
    prefix: Mapped[str] = mapped_column(sa.String(16))
    # This and `result` are JSON, compressed and encrypted (`sealed.py`).
    params: Mapped[bytes] = mapped_column(sa.LargeBinary)
    # `pending`, or the type of the result.
    status: Mapped[str] = mapped_column(sa.String(16))
    result: Mapped[bytes | None] = mapped_column(sa.LargeBinary)
