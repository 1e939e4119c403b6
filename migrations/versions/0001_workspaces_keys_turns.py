"""Workspaces, API keys and turns."""

import sqlalchemy as sa
from alembic import op

from gateway.ledger.schema import UtcDateTime

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "workspaces",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workspaces"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("created_at", UtcDateTime(), nullable=False),
        sa.Column("revoked_at", UtcDateTime(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["workspace_id"], ["workspaces.id"], name="fk_api_keys_workspace_id_workspaces"
        ),
        sa.UniqueConstraint("digest", name="uq_api_keys_digest"),
    )
    op.create_table("turns", *_turn_columns(), sa.PrimaryKeyConstraint("id", name="pk_turns"))
    op.create_index("ix_turns_opened_ms", "turns", ["opened_ms"])
    op.create_index("ix_turns_workspace_opened", "turns", ["workspace_id", "opened_ms"])


def downgrade() -> None:
    op.drop_table("turns")
    op.drop_table("api_keys")
    op.drop_table("workspaces")


def _turn_columns() -> list[sa.Column]:
    return [
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("instance", sa.String(32), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("engine", sa.String(64), nullable=True),
        sa.Column("engine_model", sa.String(256), nullable=True),
        sa.Column("epoch", sa.String(64), nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("opened_at", UtcDateTime(), nullable=False),
        sa.Column("opened_ms", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.String(32), nullable=False),
        sa.Column("miss_reason", sa.String(32), nullable=True),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in (
                "input_tokens",
                "cache_read_tokens",
                "cache_write_5m_tokens",
                "cache_write_1h_tokens",
                "automatic_tokens",
                "computed_tokens",
                "output_tokens",
                "thinking_tokens",
            )
        ),
        sa.Column("first_token_seconds", sa.Double(), nullable=True),
        sa.Column("duration_seconds", sa.Double(), nullable=True),
        sa.Column("price", sa.String(96), nullable=True),
        sa.Column("cost_nano", sa.BigInteger(), nullable=True),
        sa.Column("cost_without_cache_nano", sa.BigInteger(), nullable=True),
    ]
