"""Writes for 12 hours are a TTL class of their own. Nothing was held for so long before."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_TABLES = ("turns", "turn_rollups", "prefixes")
_COLUMN = "cache_write_12h_tokens"
# In the earlier version these writes count as those of an hour, its longest class, so that its sums
# stay whole. Its checksum does not cover the column.
_AS_HOURS = """
UPDATE {table} SET cache_write_1h_tokens = cache_write_1h_tokens + cache_write_12h_tokens
WHERE cache_write_12h_tokens > 0
"""
# A checksum of a later version is 2^32 or more: the bits above a CRC's 32 are the version.
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
