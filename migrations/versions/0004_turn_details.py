"""Turns: dialect, marked prefix, why the engine stopped, and how long each part took."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.add_column(sa.Column("dialect", sa.String(16), nullable=True))
        turns.add_column(sa.Column("prefix", sa.String(16), nullable=True))
        turns.add_column(sa.Column("prefix_ttl", sa.String(8), nullable=True))
        turns.add_column(sa.Column("stop_reason", sa.String(32), nullable=True))
        for name in ("queue_seconds", "prefill_seconds", "decode_seconds"):
            turns.add_column(sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        for name in ("decode_seconds", "prefill_seconds", "queue_seconds"):
            turns.drop_column(name)
        turns.drop_column("stop_reason")
        turns.drop_column("prefix_ttl")
        turns.drop_column("prefix")
        turns.drop_column("dialect")
