"""What engines report of leases and prefills, by epoch, and how leases ended over time."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "epoch_reports",
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("epoch", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("device", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(256), nullable=False),
        sa.Column("first_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_ms", sa.BigInteger(), nullable=False),
        sa.Column("silent_ms", sa.BigInteger(), nullable=True),
        sa.Column("granted", sa.BigInteger(), nullable=False),
        sa.Column("expired", sa.BigInteger(), nullable=False),
        sa.Column("sacrificed", sa.BigInteger(), nullable=False),
        sa.Column("yielded", sa.BigInteger(), nullable=False),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("damaged", sa.BigInteger(), nullable=False),
        sa.Column("restored_leases", sa.BigInteger(), nullable=False),
        sa.Column("lost_leases", sa.BigInteger(), nullable=False),
        sa.Column("prefill_times", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("engine", "epoch", name="pk_epoch_reports"),
    )
    op.create_table(
        "lease_ends",
        sa.Column("width_seconds", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("start_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("engine", sa.String(64), nullable=False),
        sa.Column("reason", sa.String(16), nullable=False),
        sa.Column("leases", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "width_seconds", "start_ms", "engine", "reason", name="pk_lease_ends"
        ),
    )


def downgrade() -> None:
    op.drop_table("lease_ends")
    op.drop_table("epoch_reports")
