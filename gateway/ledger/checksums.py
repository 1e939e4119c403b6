"""Silent damage to turns is found by a checksum over what each turn is billed for.

SQLite itself finds only damage to its own structure. The checksum is CRC-32 (ISO 3309), as in the
journal's records. It finds every change of up to 32 bits in a row, and all but one in 2^32 of the
others. It has no key: who can write the database can write a checksum too. What is not billed is
not covered: times, names, the user agent, fingerprints. Sums have no checksum: `rollups rebuild`
makes them anew from the turns.

The bits above the CRC's 32 are the checksum's version, from 0. It says which columns are covered. A
row keeps the version that it was inserted with.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any
from zlib import crc32

_COLUMNS_AHEAD = (
    "id",
    "instance",
    "workspace_id",
    "key_id",
    "model",
    "opened_ms",
    "outcome",
    "status",
    "input_tokens",
    "cache_read_tokens",
)
_COLUMNS_BEHIND = (
    "automatic_tokens",
    "computed_tokens",
    "output_tokens",
    "thinking_tokens",
    "price",
    "cost_nano",
    "cost_without_cache_nano",
)
_FIRST_WRITES = ("cache_write_5m_tokens", "cache_write_30m_tokens", "cache_write_1h_tokens")
# The columns of writes in each version. A version never changes: a new TTL class adds one.
_WRITES_BY_VERSION = (
    _FIRST_WRITES,
    (*_FIRST_WRITES, "cache_write_12h_tokens"),
)
_VERSIONS = tuple((*_COLUMNS_AHEAD, *writes, *_COLUMNS_BEHIND) for writes in _WRITES_BY_VERSION)
_NEWEST = len(_VERSIONS) - 1
_values_by_version = [itemgetter(*names) for names in _VERSIONS]
_CRC_BITS = 32

BILLED = _VERSIONS[_NEWEST]
"""The columns that a new turn's checksum covers."""


def checksum_of(row: Mapping[str, Any], version: int = _NEWEST) -> int:
    """The checksum of a turn, from its columns by name."""
    values = _values_by_version[version](row)
    cells = ["" if value is None else str(value) for value in values]
    return version << _CRC_BITS | crc32("\0".join(cells).encode())


def is_damaged(row: Mapping[str, Any]) -> bool:
    """Whether a row is not what was inserted. A row from before checksums can't tell: False.

    A row of an earlier version has no tokens in the columns that came later.
    """
    checksum = row["checksum"]
    if checksum is None:
        return False
    version = checksum >> _CRC_BITS
    if not 0 <= version <= _NEWEST:
        return True
    later = (name for name in BILLED if name not in _VERSIONS[version])
    return checksum != checksum_of(row, version) or any(row[name] != 0 for name in later)
