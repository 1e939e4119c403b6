"""The journal of entries, and what it gives back at a start.

One sealed line a record, so that a damaged line costs its record alone. A `put` has a whole entry,
a `touch` its times and lease, and an `end` says that the entry is gone. A record has the seconds
that were left, and the moment at which they were left by the wall clock.
"""

import hmac
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from engine.cache.block import Entry
from engine.cache.digests import TOKEN_BYTES, ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.store_tier import BlockKey
from engine.protocol import HeldName, Ttl
from engine.store.files import Missed, StoreKeys

VERSION = 1
MAX_SECONDS = 4 * 3600.0
"""The longest that any entry's time may have left, whatever the journal says."""
_SEAL_DIGITS = 32


# Records.


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a `touch`. `idle` are seconds since the last use, `age` those since writing.

    `at` are the seconds since 1970 at which all of them were so.
    """

    at: float
    left: float
    idle: float
    age: float
    is_leased: bool
    reads: int

    def seconds_since(self, wall: float) -> float:
        """A wall clock that went back counts as no time."""
        return max(wall - self.at, 0.0)


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


class Applied(NamedTuple):
    """The entry that a line was of, or why it was of none."""

    key: str | None = None
    damage: LineDamage | None = None


def apply_line(entries: dict[str, Put], line: bytes, model: str, keys: StoreKeys) -> Applied:
    """Bring what a journal has told so far up to a line, without its end.

    `model` is a fingerprint as hex. A `touch` leaves the list of an entry's blocks as it is.
    """
    if not line:
        return Applied()
    match decode_line(line, keys):
        case None:
            return Applied(damage="checksum")
        case Put() as put:
            if put.version != VERSION:
                return Applied(damage="version")
            if put.model != model:
                return Applied(damage="other_model")
            entries[put.key] = put
            return Applied(put.key)
        case Touch(key=key, times=times):
            if key in entries:
                entries[key] = msgspec.structs.replace(entries[key], times=times)
            return Applied(key)
        case End(key=key):
            entries.pop(key, None)
            return Applied(key)


class Replayed(msgspec.Struct):
    """The result of a journal: the entries that had not ended, and the damages."""

    entries: dict[str, Put]
    damages: dict[LineDamage, int]


def replay(lines: Iterable[bytes], model: str, keys: StoreKeys) -> Replayed:
    """Read all lines, the oldest first."""
    told = Replayed({}, {})
    for line in lines:
        damage = apply_line(told.entries, line.rstrip(b"\n"), model, keys).damage
        if damage is not None:
            told.damages[damage] = told.damages.get(damage, 0) + 1
    return told


def _seal(body: bytes, keys: StoreKeys) -> bytes:
    state = blake2b(body, key=keys.seal, digest_size=_SEAL_DIGITS // 2, person=b"journal")
    return state.hexdigest().encode()


# Entries of records.


def entry_of(put: Put, now: float, left: float, passed: float, *, is_leased: bool) -> Entry:
    """The entry that a record tells, without its blocks. `passed` seconds are over since then."""
    return Entry(
        put.scope,
        Digest(bytes.fromhex(put.key)),
        put.tokens,
        put.ttl,
        [],
        ready_at=now - passed - put.times.age,
        expires_at=now + left,
        kept_until=now + left,
        used_at=now - passed - put.times.idle,
        is_leased=is_leased,
        reads=put.times.reads,
        name=put.name,
        seconds=put.seconds,
    )


class Heads:
    """Looks at the headers of files, at each once."""

    def __init__(self, keys: StoreKeys, head: Callable[[str], BlockKey | Missed]) -> None:
        self._keys = keys
        self._head = head
        self._found: dict[str, BlockKey | Missed] = {}

    def of(self, put: Put) -> list[BlockKey] | Missed | None:
        """What the headers of an entry's files say, or the first that says nothing.

        None where the record names no files.
        """
        keys: list[BlockKey] = []
        for digest in put.blocks:
            try:
                name = self._keys.name_of(bytes.fromhex(digest))
            except ValueError:
                return None
            found = self._found.get(name)
            if found is None:
                found = self._found[name] = self._head(name)
            if isinstance(found, Missed):
                return found
            keys.append(found)
        return keys

    def missed(self) -> list[Missed]:
        return [found for found in self._found.values() if isinstance(found, Missed)]


def is_chain(put: Put, keys: Sequence[BlockKey], hasher: ChainHasher) -> bool:
    """Whether these files are, in order, all of the entry's tokens in its scope."""
    root = parent = hasher.root(put.scope)
    for index, key in enumerate(keys):
        if (key.place, key.owner, key.parent) != (index, root, parent):
            return False
        parent = hasher.extend(parent, key.packed)
        if parent != key.digest:
            return False
    num_tokens = sum(len(key.packed) for key in keys) // TOKEN_BYTES
    return num_tokens == put.tokens and parent.hex() == put.key


@dataclass(slots=True)
class Restored:
    """The result of a start. `misses` counts by reason.

    `damaged` are files to delete, `dead` the keys of entries that the journal can leave out.
    """

    num_entries: int = 0
    num_leases: int = 0
    num_lost: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def count(self, reason: str, amount: int = 1) -> None:
        self.misses[reason] = self.misses.get(reason, 0) + amount


def restore(
    told: Replayed, entries: Entries, hasher: ChainHasher, heads: Heads, now: float, wall: float
) -> Restored:
    """Take the entries of an earlier epoch back whose files are there.

    `now` is the engine's clock, `wall` the same moment in seconds since 1970.
    """
    result = Restored()
    for reason, amount in told.damages.items():
        result.count(f"journal_{reason}", amount)
    for put in sorted(told.entries.values(), key=lambda put: (not put.times.is_leased, put.key)):
        passed = put.times.seconds_since(wall)
        left = min(put.times.left, MAX_SECONDS) - passed
        is_leased = put.times.is_leased
        if left > 0:
            keys = heads.of(put)
            entry = entry_of(put, now, left, passed, is_leased=is_leased)
            whole = keys if isinstance(keys, list) and is_chain(put, keys, hasher) else None
            if whole is not None and entries.restore(entry, whole):
                result.num_entries += 1
                result.num_leases += is_leased
                for index, names in put.names.items():
                    if 0 <= index < len(entry.blocks):
                        told_names = {one.digest: one.tokens for one in names}
                        entry.blocks[index].names.update(told_names)
                continue
            result.num_lost += is_leased
        result.dead.append(put.key)
    for missed in heads.missed():
        result.count(missed.reason)
        if missed.reason != "missing":
            result.damaged.append(missed.name)
    return result
