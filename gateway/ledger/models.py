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

    """A limit that is NULL is none; see `gateway/access.py` for what each counts."""

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[datetime]
    display_name: Mapped[str] = mapped_column(String(128), server_default="")
    archived_at: Mapped[datetime | None]
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]
    max_concurrency: Mapped[int | None]
    monthly_spend_nano: Mapped[int | None]
    lease_share: Mapped[float | None]


class ApiKeyRow(Base):
    """`digest` is the SHA-256 of the key; the key itself is stored nowhere.

    `replaces` is the key that this one was made for by a rotation: each is replaced at most once.
    """

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    workspace_id: Mapped[str] = mapped_column(ForeignKey("workspaces.id"))
    name: Mapped[str] = mapped_column(String(64))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]
    scope: Mapped[str] = mapped_column(String(16), server_default="inference")
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    replaces: Mapped[str | None] = mapped_column(String(32), unique=True)


class WatermarkRow(Base):
    """A number that grows with every change of what it is named after.

    `access` stands for keys and workspaces: gateways look at it every two seconds, and read the
    tables only when it has grown.
    """

    __tablename__ = "watermarks"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[int]


class TurnRow(Base):
    """One closed turn. `opened_ms` is `opened_at` in milliseconds, for time buckets.

    `fingerprint` holds keyed digests only: see `prefix/fingerprint.py`.
    """

    __tablename__ = "turns"
    __table_args__ = (Index("ix_turns_workspace_opened", "workspace_id", "opened_ms"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    instance: Mapped[str] = mapped_column(String(32))
    workspace_id: Mapped[str] = mapped_column(String(64))
    key_id: Mapped[str] = mapped_column(String(32))
    model: Mapped[str] = mapped_column(String(128))
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
