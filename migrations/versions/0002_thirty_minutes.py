"""Tokens written for 30 minutes. Earlier rows have none."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

TABLES = ("turns", "turn_rollups", "prefixes")


def upgrade() -> None:
    for table in TABLES:
        column = sa.Column(
            "cache_write_30m_tokens", sa.BigInteger(), server_default="0", nullable=False
        )
        op.add_column(table, column)


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "cache_write_30m_tokens")
