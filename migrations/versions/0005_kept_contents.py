"""Prompts and answers that workspaces keep. None does before somebody says so."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("workspaces", sa.Column("keep_days", sa.BigInteger(), nullable=True))
    op.create_table(
        "turn_contents",
        sa.Column("turn_id", sa.String(64), primary_key=True),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
    )
    op.create_index("ix_turn_contents_workspace", "turn_contents", ["workspace_id", "at_ms"])


def downgrade() -> None:
    op.drop_table("turn_contents")
    op.drop_column("workspaces", "keep_days")
