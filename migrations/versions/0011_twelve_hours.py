"""Writes for 12 hours, a TTL class of its own. Nothing of before was held for so long."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TABLES = ("turns", "turn_rollups", "prefixes")
_COLUMN = "cache_write_12h_tokens"
# The earlier version's longest class has them, so that its sums stay whole. Its checksum does not
# know the column.
_AS_HOURS = """
UPDATE {table} SET cache_write_1h_tokens = cache_write_1h_tokens + cache_write_12h_tokens
WHERE cache_write_12h_tokens > 0
"""
# From 2^32 on: the bits above a CRC's 32 are the version of the checksum.
_FORGET_CHECKSUMS = "UPDATE turns SET checksum = NULL WHERE checksum >= 4294967296"


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(
            table, sa.Column(_COLUMN, sa.BigInteger(), nullable=False, server_default="0")
        )


def downgrade() -> None:
    op.execute(_FORGET_CHECKSUMS)
    for table in _TABLES:
        op.execute(_AS_HOURS.format(table=table))
        op.drop_column(table, _COLUMN)
