"""The checksum of a turn's row: it tells a row that was changed from one that was written.

SQLite finds damage to its own structure, not to the numbers in it. PostgreSQL does so only where
its cluster was made with data checksums.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from zlib import crc32

import msgspec

COLUMN = "checksum"
_MAX_ORDERS = 64
_encode = msgspec.json.Encoder().encode


def checksum_of(row: Mapping[str, Any]) -> int:
    """CRC-32 of the columns that are not NULL, by name, but the checksum itself.

    A column that a later version adds is NULL in older rows, and changes nothing there.
    """
    found = [(name, value) for name in _ordered(tuple(row)) if (value := row[name]) is not None]
    return crc32(_encode(found))


@lru_cache(_MAX_ORDERS)
def _ordered(names: tuple[str, ...]) -> list[str]:
    """The columns that are checked, by name. Sorting them costs more than checking a row."""
    return sorted(name for name in names if name != COLUMN)
