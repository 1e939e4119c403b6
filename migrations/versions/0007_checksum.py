"""Turns: a checksum of the row, so that damage inside a row is found."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.add_column(sa.Column("checksum", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("turns") as turns:
        turns.drop_column("checksum")
