"""Sums over turns: by hour and day, times to first token, prefixes. Existing turns are counted."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_SUMS = (
    "requests",
    "requests_with_read",
    "errors",
    "unpriced",
    "input_tokens",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "automatic_tokens",
    "computed_tokens",
    "output_tokens",
    "thinking_tokens",
    "cost_nano",
    "cost_without_cache_nano",
    "prefill_tokens",
    "prefill_us",
)
_PREFIX_SUMS = (
    "first_ms",
    "last_ms",
    "requests",
    "requests_with_read",
    "unpriced",
    "cache_read_tokens",
    "cache_write_5m_tokens",
    "cache_write_1h_tokens",
    "cost_nano",
    "cost_without_cache_nano",
    "gaps_5m",
    "gaps_1h",
)


def upgrade() -> None:
    op.drop_index("ix_turns_opened_ms", "turns")
    op.drop_index("ix_turns_workspace_opened", "turns")
    op.create_index("ix_turns_opened", "turns", ["opened_ms", "id"])
    op.create_index("ix_turns_workspace_opened", "turns", ["workspace_id", "opened_ms", "id"])
    for name in ("prefix", "outcome", "miss_reason"):
        op.create_index(f"ix_turns_{name}", "turns", [name, "opened_ms", "id"])
    _create(
        "turn_rollups",
        [
            *_keys("width_seconds", "start_ms", workspace_id=64, key_id=32, engine=64, model=128),
            *_keys(price=96),
            *_keys("prompt_above"),
        ],
        _numbers(*_SUMS),
    )
    _create(
        "reason_rollups",
        [
            *_keys("width_seconds", "start_ms", workspace_id=64, engine=64, model=128),
            *_keys(kind=8, value=32),
        ],
        _numbers("requests"),
    )
    _create(
        "latency_rollups",
        [
            *_keys("start_ms", workspace_id=64, engine=64, model=128),
            *_keys("prompt_bucket", "has_read", "bin"),
        ],
        _numbers("requests"),
    )
    _create(
        "prefixes",
        _keys(workspace_id=64, prefix=16),
        [
            sa.Column("model", sa.String(128), nullable=False),
            sa.Column("ttl", sa.String(8), nullable=True),
            sa.Column("price", sa.String(96), nullable=True),
            *_numbers(*_PREFIX_SUMS),
        ],
    )
    op.create_index(
        "ix_prefixes_reused",
        "prefixes",
        ["last_ms"],
        sqlite_where=sa.text("requests > 1"),
        postgresql_where=sa.text("requests > 1"),
    )
    _create("horizon", _keys("id"), _numbers("turns_ms"))


def downgrade() -> None:
    for table in ("horizon", "prefixes", "latency_rollups", "reason_rollups", "turn_rollups"):
        op.drop_table(table)
    for name in ("prefix", "outcome", "miss_reason"):
        op.drop_index(f"ix_turns_{name}", "turns")
    op.drop_index("ix_turns_workspace_opened", "turns")
    op.drop_index("ix_turns_opened", "turns")
    op.create_index("ix_turns_opened_ms", "turns", ["opened_ms"])
    op.create_index("ix_turns_workspace_opened", "turns", ["workspace_id", "opened_ms"])


def _create(name: str, keys: list[sa.Column], others: list[sa.Column]) -> None:
    names = [key.name for key in keys]
    op.create_table(name, *keys, *others, sa.PrimaryKeyConstraint(*names, name=f"pk_{name}"))


def _keys(*numbers: str, **texts: int) -> list[sa.Column]:
    """Key columns: integers, then texts with their lengths."""
    return [
        *_numbers(*numbers),
        *(sa.Column(name, sa.String(length), nullable=False) for name, length in texts.items()),
    ]


def _numbers(*names: str) -> list[sa.Column]:
    return [sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=False) for name in names]
