"""Turns: how much of the prompt the best engine held, and how much the chosen one held."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.add_column(sa.Column("available_tokens", sa.BigInteger(), nullable=True))
        turns.add_column(sa.Column("captured_tokens", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.drop_column("captured_tokens")
        turns.drop_column("available_tokens")
