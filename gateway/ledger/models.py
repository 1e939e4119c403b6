"""The tables. Times are aware UTC, money is integer nano-dollars, tokens are integers."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    DateTime,
    Double,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    TypeDecorator,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from gateway.record import MODEL_CHARACTERS

NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """Refuses naive values; gives aware ones back on every database."""

    impl = DateTime(timezone=True)
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
    metadata = MetaData(naming_convention=NAMING_CONVENTION)
    type_annotation_map = {datetime: UtcDateTime(), int: BigInteger(), float: Double()}  # noqa: RUF012


class WorkspaceRow(Base):
    __tablename__ = "workspaces"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]


class ApiKeyRow(Base):
    """`digest` is the SHA-256 of the key; the key itself is stored nowhere."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class TurnRow(Base):
    """One closed turn, field by field as `TurnRecord` explains it.

    `opened_ms` is `opened_at` in milliseconds, for time buckets. `price` is the id of the price
    sheet with its version (`name@date`). `fingerprint` and `prefix` hold keyed digests only.
    """

    __tablename__ = "turns"
    __table_args__ = (Index("ix_turns_workspace_opened", "workspace_id", "opened_ms"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    instance: Mapped[str] = mapped_column(String(32))
    workspace_id: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(32))
    model: Mapped[str] = mapped_column(String(MODEL_CHARACTERS))
    engine: Mapped[str | None] = mapped_column(String(64))
    engine_model: Mapped[str | None] = mapped_column(String(256))
    epoch: Mapped[str | None] = mapped_column(String(64))
    stream: Mapped[bool]
    opened_at: Mapped[datetime]
    opened_ms: Mapped[int] = mapped_column(index=True)
    outcome: Mapped[str] = mapped_column(String(32))
    miss_reason: Mapped[str | None] = mapped_column(String(32))
    input_tokens: Mapped[int]
    cache_read_tokens: Mapped[int]
    cache_write_5m_tokens: Mapped[int]
    cache_write_1h_tokens: Mapped[int]
    automatic_tokens: Mapped[int]
    computed_tokens: Mapped[int]
    output_tokens: Mapped[int]
    thinking_tokens: Mapped[int]
    first_token_seconds: Mapped[float | None]
    duration_seconds: Mapped[float | None]
    price: Mapped[str | None] = mapped_column(String(96))
    cost_nano: Mapped[int | None]
    cost_without_cache_nano: Mapped[int | None]
    num_removed: Mapped[int] = mapped_column(server_default="0")
    fingerprint: Mapped[bytes | None] = mapped_column(LargeBinary)
    dialect: Mapped[str | None] = mapped_column(String(16))
    prefix: Mapped[str | None] = mapped_column(String(16))
    prefix_ttl: Mapped[str | None] = mapped_column(String(8))
    stop_reason: Mapped[str | None] = mapped_column(String(32))
    queue_seconds: Mapped[float | None]
    prefill_seconds: Mapped[float | None]
    decode_seconds: Mapped[float | None]
