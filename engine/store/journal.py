"""The journal of entries, and what it gives back at a start.

Each record is one sealed line, so that a damaged line costs its record alone. A `put` has a whole
entry, a `touch` has its times and lease, and an `end` says that the entry is gone. A record has the
seconds that were left at a moment, and that moment by the wall clock. A `put` has all tokens of the
entry, so that the keys of its files can be computed. With vLLM it has the names of the files.
"""

import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

import msgspec

from engine.cache.block import Entry
from engine.cache.digests import TOKEN_BYTES, ChainHasher, ChainKind
from engine.cache.ids import Digest
from engine.cache.recurrent import split_states
from engine.cache.store_tier import BlockKey
from engine.protocol import HeldName, Ttl
from engine.store.files import Missed, StoreKeys

_SEAL_DIGITS = 32


class SavedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A whole entry in one file of another program: what must be true of it before it is read."""

    # Within its directory.
    name: str
    num_tokens: int
    num_bytes: int
    # The digest of all its bytes, in hex.
    sha256: str


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an entry that change, at one moment. Durations are in seconds."""

    # The moment, in seconds since 1970.
    at: float
    # The time until the entry expires.
    left: float
    # The time since its last use.
    idle: float
    # The time since it was written.
    age: float
    is_leased: bool
    reads: int
    is_asked_for: bool = True

    @classmethod
    def of(cls, entry: Entry, now: float, wall: float) -> "Times":
        """`now` is the engine's clock, `wall` the same moment in seconds since 1970."""
        return cls(
            at=wall,
            left=entry.expires_at - now,
            idle=max(now - entry.used_at, 0.0),
            age=now - entry.ready_at,
            is_leased=entry.is_leased,
            reads=entry.reads,
            is_asked_for=entry.is_asked_for,
        )

    def seconds_since(self, wall: float) -> float:
        """The time since the moment. It is 0 if the wall clock was set back."""
        return max(wall - self.at, 0.0)

    def seconds_left(self, wall: float) -> float:
        return self.left - self.seconds_since(wall)


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """An entry."""

    # Its chain digest, in hex.
    key: str
    # The fingerprint of the model, in hex.
    model: str
    scope: str
    # Its token ids, and the markers of its state.
    packed: bytes
    ttl: Ttl
    seconds: float | None
    name: str | None
    # The names at each block, by the block's index.
    names: dict[int, list[HeldName]]
    times: Times
    # The chain's kind, which need not be an adapter's. Existing journals have it under this name.
    adapter: ChainKind | None = None
    # vLLM's block hashes.
    files: list[bytes] = []
    # llama.cpp's slot file.
    slot_file: SavedFile | None = None

    @classmethod
    def of(
        cls, entry: Entry, times: Times, packed: bytes, names: dict[int, list[HeldName]]
    ) -> "Put":
        """The record without the model, which the store adds."""
        return cls(
            key=entry.key.hex(),
            model="",
            scope=entry.scope,
            packed=packed,
            ttl=entry.ttl,
            seconds=entry.seconds,
            name=entry.name,
            names=names,
            times=times,
            adapter=entry.kind,
        )

    def keys(self, hasher: ChainHasher, file_keys: StoreKeys) -> list[BlockKey] | None:
        """The keys of the entry's files, in order. None: its tokens don't give its own key."""
        keys: list[BlockKey] = []
        root = parent = hasher.root(self.scope)
        stride = hasher.block_size * TOKEN_BYTES
        end = split_states(self.packed)
        if end == 0:
            return None
        starts = [*range(0, end, stride), *range(end, len(self.packed), stride)]
        for place, (start, behind) in enumerate(pairwise([*starts, len(self.packed)])):
            piece = self.packed[start:behind]
            digest = hasher.extend(parent, piece, place, self.adapter)
            keys.append(BlockKey(file_keys.name_of(digest), root, digest, parent, place, piece))
            parent = digest
            if behind == end and digest.hex() != self.key:
                return None
        return keys

    def entry(self, now: float, wall: float, *, is_leased: bool) -> Entry:
        """The entry without its blocks. `now` is the engine's clock, `wall` the same moment."""
        written = now - self.times.seconds_since(wall)
        expires_at = now + self.times.seconds_left(wall)
        return Entry(
            self.scope,
            Digest(bytes.fromhex(self.key)),
            split_states(self.packed) // TOKEN_BYTES,
            self.ttl,
            [],
            ready_at=written - self.times.age,
            expires_at=expires_at,
            kept_until=expires_at,
            used_at=written - self.times.idle,
            is_leased=is_leased,
            is_asked_for=self.times.is_asked_for,
            reads=self.times.reads,
            name=self.name,
            seconds=self.seconds,
            kind=self.adapter,
        )


class Touch(msgspec.Struct, frozen=True, kw_only=True, tag="touch"):
    key: str
    times: Times


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    key: str


Record = Put | Touch | End


# Finds an entry's key in a line that is damaged elsewhere.
_KEY = re.compile(rb'"key":"([0-9a-f]+)"')
_NO_LEASE = b'"is_leased":false'
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


def _seal(body: bytes, keys: StoreKeys) -> bytes:
    state = blake2b(body, key=keys.seal, digest_size=_SEAL_DIGITS // 2, person=b"journal")
    return state.hexdigest().encode()


class JournalContent:
    """The state that the lines of a journal describe, as far as they were read."""

    def __init__(self, model: str, keys: StoreKeys) -> None:
        """`model` is a fingerprint as hex."""
        self._model = model
        self._keys = keys
        # The entries that have not ended, by their keys.
        self.entries: dict[str, Put] = {}
        # The keys of the entries that lines have changed since a follower last looked.
        self.changed: set[str] = set()
        # The number of damaged lines, by reason.
        self.damages: Counter[str] = Counter()
        # The keys of leased entries whose line is damaged. If the key can't be read either, the
        # line's number stands for it.
        self.lost: set[str] = set()

    def take(self, lines: Iterable[bytes]) -> None:
        """Take in further lines, the oldest first."""
        for line in lines:
            whole = line.rstrip(b"\n")
            if not whole:
                continue
            record = decode_line(whole, self._keys)
            if record is None:
                self.damages["checksum"] += 1
                key = _KEY.search(whole)
                if _NO_LEASE not in whole and b'"type":"end"' not in whole:
                    self.lost.add(key[1].decode() if key else f"line {self.damages.total()}")
                continue
            match record:
                case Put(model=model) if model != self._model:
                    self.damages["other_model"] += 1
                    continue
                case Put():
                    self.entries[record.key] = record
                    self.lost.discard(record.key)
                case Touch() if record.key in self.entries:
                    put = self.entries[record.key]
                    self.entries[put.key] = msgspec.structs.replace(put, times=record.times)
                case Touch() if record.times.is_leased:
                    self.lost.add(record.key)
                case End() | Touch():
                    self.entries.pop(record.key, None)
                    self.lost.discard(record.key)
            self.changed.add(record.key)


def replay(lines: Iterable[bytes], model: str, keys: StoreKeys) -> JournalContent:
    content = JournalContent(model, keys)
    content.take(lines)
    return content


@dataclass(slots=True)
class Restored:
    """The result of a start."""

    num_entries: int = 0
    num_leases: int = 0
    # The leases that were live according to the journal, and whose content can't be read.
    num_lost: int = 0
    # The number of unusable files and lines, by reason.
    misses: Counter[str] = field(default_factory=Counter)
    # The keys of entries that the journal can leave out.
    dead: list[str] = field(default_factory=list)


def restore(
    content: JournalContent,
    take_back: Callable[[Entry, Sequence[BlockKey]], bool],
    keys_of: Callable[[Put], list[BlockKey] | None],
    miss_of: Callable[[BlockKey], Missed | None],
    now: float,
    wall: float,
) -> Restored:
    """Take back the entries of an earlier epoch whose files are there, each of its size.

    `now` is the engine's clock, `wall` the same moment in seconds since 1970. `take_back` returns
    False where an entry has no room. `miss_of` looks for a file. It is called once for each file.
    """
    result = Restored(num_lost=len(content.lost - content.entries.keys()))
    result.misses.update({f"journal_{reason}": n for reason, n in content.damages.items()})
    missed: dict[str, Missed | None] = {}
    for put in sorted(content.entries.values(), key=lambda put: (not put.times.is_leased, put.key)):
        is_leased = put.times.is_leased
        if put.times.seconds_left(wall) <= 0:
            result.dead.append(put.key)
            continue
        keys = keys_of(put) or []
        for key in keys:
            if key.name not in missed:
                missed[key.name] = miss_of(key)
        is_whole = bool(keys) and not any(missed[key.name] for key in keys)
        entry = put.entry(now, wall, is_leased=is_leased)
        if is_whole and take_back(entry, keys):
            result.num_entries += 1
            result.num_leases += is_leased
            _anchor_names(put, entry)
        else:
            result.num_lost += is_leased
            result.dead.append(put.key)
    for miss in filter(None, missed.values()):
        result.misses[miss.reason] += 1
    return result


def _anchor_names(put: Put, entry: Entry) -> None:
    """Give the entry's blocks the names that they have in the journal."""
    for index, names in put.names.items():
        if 0 <= index < len(entry.blocks):
            entry.blocks[index].names.update({name.digest: name.tokens for name in names})
