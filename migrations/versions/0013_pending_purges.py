"""Purges that engines still have to do, because they were away when an operator asked for them."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "pending_purges",
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("asked_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "scope", name="pk_pending_purges"),
    )


def downgrade() -> None:
    op.drop_table("pending_purges")
