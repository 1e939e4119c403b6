"""A record with its seal: a checksum over the turn's id, whether it is closed, and the record.

SQLite finds damage to its own structure, not to what it holds: a flipped digit would be billed.
"""

import re
from zlib import crc32

_SEAL = re.compile(rb"\n([0-9a-f]{8})\Z")
# As `seal` writes it. A record of JSON has no line break, and begins with the turn's id.
SEALED = re.compile(rb'\{"id":"([A-Za-z0-9_]{1,64})",[^\n]{1,1000000}?\n[0-9a-f]{8}')


class Broken(Exception):
    """The record is not what was written."""


def seal(turn_id: str, is_closed: bool, record: bytes) -> bytes:
    return b"%b\n%08x" % (record, _sum(turn_id, is_closed, record))


def unseal(turn_id: str, is_closed: bool, sealed: bytes) -> tuple[bool, bytes]:
    """Whether the turn is closed, and its record. Raise Broken.

    A record of an earlier version has no seal. Its row tells whether it is closed.
    """
    found = _SEAL.search(sealed)
    if found is None:
        return is_closed, sealed
    record, told = sealed[: found.start()], int(found[1], 16)
    for state in (is_closed, not is_closed):
        if _sum(turn_id, state, record) == told:
            return state, record
    raise Broken


def _sum(turn_id: str, is_closed: bool, record: bytes) -> int:
    return crc32(record, crc32(b"%b %d " % (turn_id.encode(), is_closed)))
