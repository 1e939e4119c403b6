"""Silent damage to turns: a checksum of each over what is billed.

SQLite finds damage where it breaks its own structure alone. The checksum is CRC-32 (ISO 3309), as
of the journal's records: it finds each change of up to 32 bits in a row, and others but for one in
2^32. It is not keyed: who may write the database may write it too. What is not billed (times,
names, the user agent, fingerprints) has none. Sums have none either: `rollups rebuild` makes them
again from the turns.
"""

from collections.abc import Mapping
from operator import itemgetter
from typing import Any
from zlib import crc32

BILLED = (
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
    "cache_write_5m_tokens",
    "cache_write_30m_tokens",
    "cache_write_1h_tokens",
    "automatic_tokens",
    "computed_tokens",
    "output_tokens",
    "thinking_tokens",
    "price",
    "cost_nano",
    "cost_without_cache_nano",
)
"""The columns that the checksum is of. A column that is added to them needs another checksum."""
_billed_of = itemgetter(*BILLED)


def checksum_of(row: Mapping[str, Any]) -> int:
    """Of a turn's columns by name."""
    cells = ["" if cell is None else str(cell) for cell in _billed_of(row)]
    return crc32("\0".join(cells).encode())
