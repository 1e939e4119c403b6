"""Turns: their prompt's fingerprint, and how many client nonces were left out of it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.add_column(
            sa.Column("num_removed", sa.BigInteger(), nullable=False, server_default="0")
        )
        turns.add_column(sa.Column("fingerprint", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.drop_column("fingerprint")
        turns.drop_column("num_removed")
