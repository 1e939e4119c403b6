"""Writes for 12 hours are a TTL class of their own. Nothing was held for so long before."""

from typing import Any

import msgspec
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
# It fails on the class's name in these columns, and in the marks of a fingerprint.
_NAME_HOURS = (
    "UPDATE turns SET prefix_ttl = '1h' WHERE prefix_ttl = '12h'",
    "UPDATE prefixes SET ttl = '1h' WHERE ttl = '12h'",
)
# A fingerprint is an array, in MessagePack, that has the marks at this place. Earlier ones are
# shorter.
_MARKS = slice(9, 10)
_FINGERPRINTS = """
SELECT id, fingerprint FROM turns WHERE id > :last AND {has_name} ORDER BY id LIMIT 500
"""
_HAS_NAME = {
    "sqlite": "instr(fingerprint, :name) > 0",
    "postgresql": "position(CAST(:name AS bytea) IN fingerprint) > 0",
}
_STORE_FINGERPRINT = "UPDATE turns SET fingerprint = :fingerprint WHERE id = :id"
# The bits of a checksum above a CRC's 32 are its version. The first one with the column is 1, and
# the number is 1 << 32. A revision for a further column has its own version here.
_FORGET_CHECKSUMS = "UPDATE turns SET checksum = NULL WHERE checksum >= 4294967296"


def upgrade() -> None:
    for table in _TABLES:
        op.add_column(
            table, sa.Column(_COLUMN, sa.BigInteger(), nullable=False, server_default="0")
        )


def _name_hours_in_marks(packed: bytes) -> bytes:
    values = msgspec.msgpack.decode(packed, type=list[Any])
    values[_MARKS] = [
        [(segment, "1h" if ttl == "12h" else ttl) for segment, ttl in marks]
        for marks in values[_MARKS]
    ]
    return msgspec.msgpack.encode(values)


def _name_hours_in_fingerprints() -> None:
    connection = op.get_bind()
    query = sa.text(_FINGERPRINTS.format(has_name=_HAS_NAME[connection.dialect.name]))
    last = ""
    while True:
        rows = connection.execute(query, {"last": last, "name": b"12h"}).all()
        if not rows:
            return
        values = [
            {"id": row.id, "fingerprint": _name_hours_in_marks(row.fingerprint)} for row in rows
        ]
        connection.execute(sa.text(_STORE_FINGERPRINT), values)
        last = rows[-1].id


def downgrade() -> None:
    op.execute(_FORGET_CHECKSUMS)
    for statement in _NAME_HOURS:
        op.execute(statement)
    _name_hours_in_fingerprints()
    for table in _TABLES:
        op.execute(_AS_HOURS.format(table=table))
        op.drop_column(table, _COLUMN)
