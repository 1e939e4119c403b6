"""The work of the engine's thread for other members of a shared store, around each step."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.store_tier import BlockKey, PeerTier
from engine.clock import Clock
from engine.protocol import HeldName
from engine.store.moments import WallClock, elapsed
from engine.store.peers import PeerEnd, PeerPut, Peers, PeerUnfit
from engine.store.restore import MAX_SECONDS, entry_of, is_chain
from engine.store.threads import Arrived, Missed

LOOKED_AT = 32
"""Entries of other members that one step looks at again."""
MAX_LOST = 65_536


class PeerEntries:
    """The entries that other members have, as far as this engine has them nowhere above."""

    def __init__(self, entries: Entries, tier: PeerTier, above: Sequence[BlockPool]) -> None:
        self._entries = entries
        self._tier = tier
        self._above = above

    def take_in(
        self, entry: Entry, keys: Sequence[BlockKey], names: Mapping[int, Sequence[HeldName]]
    ) -> bool:
        """Take in another member's entry, or a later expiry of it.

        False if this engine has an equal one of its own, or there is no room.
        """
        there = self._entries.get(entry.key)
        if there is not None:
            if not self._is_idle_here(there) or there.expires_at >= entry.expires_at:
                return False
            self._entries.end(there, "ttl_expired")
        blocks = self._tier.acquire_keys(keys)
        if blocks is None:
            return False
        entry.blocks = blocks
        self._entries.take_in(entry)
        for index, found in names.items():
            if 0 <= index < len(keys) and not self._is_above(keys[index]):
                blocks[index].names.update({one.digest: one.tokens for one in found})
                self._tier.tell(blocks[index].names)
        self._tier.pool.release_chain(blocks)
        return True

    def has(self, key: Digest) -> bool:
        """Whether this engine has the entry, anywhere."""
        return self._entries.get(key) is not None

    def ended(self, key: Digest) -> None:
        """The other member has it no more. What this engine has above is its own."""
        entry = self._entries.get(key)
        if entry is not None and self._is_idle_here(entry):
            self._entries.end(entry, "ttl_expired")

    def lost(self, name: str) -> None:
        """A file is not there, or not what it must be: what stands on it ends."""
        self._tier.forget_read(name)
        block = self._tier.block_of(name)
        if block is None:
            return
        for entry in list(block.dependents):
            self._entries.end(entry, "damaged")
        self._tier.forget(block)

    def sweep(self) -> None:
        """End the entries whose blocks made way for others here."""
        for entry in self._tier.pool.take_broken():
            if self._entries.get(entry.key) is entry:
                self._entries.end(entry, entry.why_broken)
        self._tier.take_deletes()

    def _is_idle_here(self, entry: Entry) -> bool:
        """Whether it is only another member's, and no request is reading it."""
        is_theirs = any(block.home is self._tier.pool for block in entry.blocks)
        return is_theirs and not entry.is_leased and not entry.refreshed_until

    def _is_above(self, key: BlockKey) -> bool:
        return any(pool.find(key.digest, key.packed) is not None for pool in self._above)


class PeerWork:
    """Takes in what the members' journals and files say. None of its methods waits for a file.

    An entry that made way here while another member still has it is taken in again, where there is
    room. A few are looked at in each step, in turn.
    """

    def __init__(
        self,
        tier: PeerTier,
        entries: PeerEntries,
        peers: Peers,
        hasher: ChainHasher,
        clock: Clock,
        wall: WallClock,
    ) -> None:
        self._tier = tier
        self._entries = entries
        self._peers = peers
        self._hasher = hasher
        self._clock = clock
        self._wall = wall
        self.read_bytes = 0
        self.misses: dict[str, int] = {}
        # In the order in which they are looked at again.
        self._known: OrderedDict[Digest, PeerPut] = OrderedDict()
        # Files that were not there, or not what they must be.
        self._lost: set[str] = set()

    @property
    def is_reading(self) -> bool:
        return self._tier.is_reading

    @property
    def num_blocks(self) -> int:
        """Blocks of other members that this engine knows."""
        return self._tier.num_used

    def before_step(self) -> None:
        for result in self._peers.take_results():
            match result:
                case PeerPut():
                    self._learn(result)
                case PeerEnd():
                    key = Digest(bytes.fromhex(result.key))
                    self._known.pop(key, None)
                    self._entries.ended(key)
                case Arrived():
                    self.read_bytes += len(result.payload)
                    self._tier.arrived(result.name, result.payload)
                case PeerUnfit():
                    self._count(result.reason)
                case Missed():
                    self._count(result.reason)
                    self._lose(result.name)
        self._entries.sweep()
        self._look_again()

    def after_step(self) -> None:
        for key in self._tier.take_asked():
            self._peers.read(key)

    def drop_scope(self, owner: Digest) -> None:
        """A scope was dropped: none of its content is found here any more."""
        for key in [key for key, one in self._known.items() if one.keys[0].owner == owner]:
            del self._known[key]
        self._tier.drop_scope(owner)
        self._tier.take_deletes()

    def drop_entry(self, key: Digest) -> None:
        """An entry was dropped: it is not taken in again."""
        self._known.pop(key, None)

    def close(self) -> None:
        self._peers.close()

    # Inside.

    def _count(self, damage: str) -> None:
        reason = f"peer_{damage}"
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def _learn(self, found: PeerPut) -> None:
        """A member has written an entry, or prolonged it. Its files are there."""
        key = Digest(bytes.fromhex(found.put.key))
        self._known[key] = found
        self._lost.difference_update(one.name for one in found.keys)
        self._put(key, found)

    def _lose(self, name: str) -> None:
        if len(self._lost) >= MAX_LOST:
            self._lost.clear()
        self._lost.add(name)
        self._entries.lost(name)

    def _look_again(self) -> None:
        for _ in range(min(LOOKED_AT, len(self._known))):
            key = next(iter(self._known))
            self._known.move_to_end(key)
            found = self._known[key]
            if not self._entries.has(key) and self._is_whole(found):
                self._put(key, found)

    def _is_whole(self, found: PeerPut) -> bool:
        """Whether no file is known to be lost, and nothing here makes way for the entry."""
        is_there = not any(key.name in self._lost for key in found.keys)
        return is_there and self._tier.has_room(found.keys)

    def _put(self, key: Digest, found: PeerPut) -> None:
        put, keys = found
        passed = elapsed(put.times.at, self._wall.moment()).seconds
        left = min(put.times.left, MAX_SECONDS) - passed
        if left <= 0 or not is_chain(put, keys, self._hasher):
            self._known.pop(key, None)
            return
        entry = entry_of(put, self._clock.now(), left, passed, is_leased=False)
        self._entries.take_in(entry, keys, put.names)
