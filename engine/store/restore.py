"""The entries of an earlier epoch: those of the journal whose files are there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.cache.block import Entry
from engine.cache.digests import TOKEN_BYTES, ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.store_tier import BlockKey
from engine.store.block_file import Damage
from engine.store.journal import Put, Replayed
from engine.store.keys import StoreKeys
from engine.store.moments import Moment, elapsed
from engine.store.threads import Missed

MAX_SECONDS = 4 * 3600.0
"""The longest that any entry's time may have left, whatever the journal says."""


@dataclass(slots=True)
class Restored:
    """The result of a start. `misses` counts by reason.

    `damaged` are files to delete, `dead` the keys of entries that the journal can leave out.
    """

    num_entries: int = 0
    num_leases: int = 0
    num_lost: int = 0
    moved_seconds: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)

    def count(self, reason: str, amount: int = 1) -> None:
        self.misses[reason] = self.misses.get(reason, 0) + amount


class Restorer:
    """Takes the journal's entries back into an engine that has just started."""

    def __init__(
        self,
        entries: Entries,
        hasher: ChainHasher,
        keys: StoreKeys,
        head: Callable[[str], BlockKey | Missed],
    ) -> None:
        self._entries = entries
        self._hasher = hasher
        self._keys = keys
        self._head = head
        self._heads: dict[str, BlockKey | Missed] = {}
        self._result = Restored()

    def restore(self, told: Replayed, now: float, moment: Moment) -> Restored:
        """`now` is the engine's clock, `moment` the same moment of the machine's."""
        for reason, amount in told.damages.items():
            self._result.count(f"journal_{reason}", amount)
        order = sorted(told.entries.values(), key=lambda put: (not put.times.is_leased, put.key))
        for put in order:
            passed = elapsed(put.times.at, moment)
            if abs(passed.moved) > abs(self._result.moved_seconds):
                self._result.moved_seconds = passed.moved
            left = min(put.times.left, MAX_SECONDS) - passed.seconds
            if left <= 0 or not self._take_in(put, now, left, passed.seconds):
                self._result.dead.append(put.key)
        return self._result

    def _take_in(self, put: Put, now: float, left: float, passed: float) -> bool:
        keys = self._chain(put)
        entry = entry_of(put, now, left, passed, is_leased=put.times.is_leased)
        if keys is None or not self._entries.restore(entry, keys):
            self._result.num_lost += put.times.is_leased
            return False
        self._result.num_entries += 1
        self._result.num_leases += put.times.is_leased
        for index, names in put.names.items():
            if 0 <= index < len(entry.blocks):
                entry.blocks[index].names.update({one.digest: one.tokens for one in names})
        return True

    def _chain(self, put: Put) -> list[BlockKey] | None:
        """The keys of an entry's blocks, None where they are not its scope's first `tokens`."""
        keys: list[BlockKey] = []
        for digest in put.blocks:
            name = self._keys.name_of(bytes.fromhex(digest))
            found = self._heads.get(name)
            if found is None:
                found = self._heads[name] = self._head(name)
                if isinstance(found, Missed):
                    self._miss(found.name, found.reason)
            if isinstance(found, Missed):
                return None
            keys.append(found)
        return keys if is_chain(put, keys, self._hasher) else None

    def _miss(self, name: str, reason: Damage) -> None:
        self._result.count(reason)
        if reason != "missing":
            self._result.damaged.append(name)


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
