"""The journal of entries: one sealed line a record, so that a damaged line costs its record alone.

A `put` has a whole entry, a `touch` its times and lease, and an `end` says that the entry is gone.
A record has the seconds that were left, and the moment at which they were left. Pure.
"""

import hmac
from collections.abc import Iterable
from hashlib import blake2b
from typing import Literal

import msgspec

from engine.protocol import HeldName, Ttl
from engine.store.keys import StoreKeys
from engine.store.moments import Moment

VERSION = 1
MAX_LINE_BYTES = 16 * 2**20
_SEAL_DIGITS = 32


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a `touch`. `idle` are seconds since the last use, `age` those since writing."""

    at: Moment
    left: float
    idle: float
    age: float
    is_leased: bool
    reads: int


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """An entry. `blocks` are the chain digests of its copy, as hex; `names` are by block.

    `epoch` is that of the engine whose request wrote it.
    """

    key: str
    model: str
    epoch: str
    scope: str
    tokens: int
    ttl: Ttl
    seconds: float | None
    name: str | None
    blocks: list[str]
    names: dict[int, list[HeldName]]
    times: Times
    version: int = VERSION


class Touch(msgspec.Struct, frozen=True, kw_only=True, tag="touch"):
    key: str
    times: Times


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    key: str


Record = Put | Touch | End
LineDamage = Literal["checksum", "version", "other_model"]

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


def encode_line(record: Record, keys: StoreKeys) -> bytes:
    body = _encoder.encode(record)
    return _seal(body, keys) + b" " + body + b"\n"


def decode_line(line: bytes, keys: StoreKeys) -> Record | None:
    """The record of a line; None for a line that is not whole."""
    seal, blank, body = line.partition(b" ")
    if not blank or not hmac.compare_digest(seal, _seal(body, keys)):
        return None
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError:
        return None


class Replayed(msgspec.Struct):
    """The result of a journal: the entries that had not ended, and the damages."""

    entries: dict[str, Put]
    damages: dict[LineDamage, int]


def replay(lines: Iterable[bytes], model: str, keys: StoreKeys) -> Replayed:
    """Read all lines, the oldest first."""
    entries: dict[str, Put] = {}
    damages: dict[LineDamage, int] = {}

    def count(reason: LineDamage) -> None:
        damages[reason] = damages.get(reason, 0) + 1

    for line in lines:
        if line == b"\n":
            continue
        record = decode_line(line.rstrip(b"\n"), keys)
        match record:
            case None:
                count("checksum")
            case Put() if record.version != VERSION:
                count("version")
            case Put() if record.model != model:
                count("other_model")
            case Put():
                entries[record.key] = record
            case Touch() if record.key in entries:
                whole = entries[record.key]
                entries[record.key] = msgspec.structs.replace(whole, times=record.times)
            case End():
                entries.pop(record.key, None)
    return Replayed(entries, damages)


def _seal(body: bytes, keys: StoreKeys) -> bytes:
    state = blake2b(body, key=keys.seal, digest_size=_SEAL_DIGITS // 2, person=b"journal")
    return state.hexdigest().encode()
