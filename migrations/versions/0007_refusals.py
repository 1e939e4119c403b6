"""How many requests were refused before they were turns, by minute, key and reason."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "refusals",
        sa.Column("minute_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("workspace_id", sa.String(64), nullable=False),
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("reason", sa.String(64), nullable=False),
        sa.Column("gateway", sa.String(8), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "minute_ms", "workspace_id", "key_id", "reason", "gateway", name="pk_refusals"
        ),
    )


def downgrade() -> None:
    op.drop_table("refusals")
