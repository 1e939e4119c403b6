"""Batches of messages, and their rows."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
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
    op.create_index("ix_batches_workspace", "batches", ["workspace_id", "created_at", "id"])
    op.create_index("ix_batches_status", "batches", ["status", "owned_until"])
    op.create_table(
        "batch_rows",
        sa.Column("batch_id", sa.String(40), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("custom_id", sa.String(64), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("params", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("result", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("batch_id", "position", name="pk_batch_rows"),
    )
    op.create_index("ix_batch_rows_rank", "batch_rows", ["batch_id", "status", "rank"])


def downgrade() -> None:
    op.drop_table("batch_rows")
    op.drop_table("batches")
