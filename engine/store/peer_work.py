"""What the engine's thread does for the other members of a shared store, around each step."""

from engine.cache.digests import ChainHasher
from engine.cache.ids import Digest
from engine.cache.peer_tier import PeerEntries, PeerTier
from engine.clock import Clock
from engine.store.moments import WallClock, elapsed
from engine.store.peers import PeerEnd, PeerPut, Peers, PeerUnfit
from engine.store.restore import MAX_SECONDS, entry_of, is_chain
from engine.store.threads import Arrived, Missed


class PeerWork:
    """Takes in what the members' journals and files say. None of its methods waits for a file."""

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

    @property
    def is_reading(self) -> bool:
        return self._tier.reads.is_reading

    @property
    def num_blocks(self) -> int:
        """Blocks of other members that this engine knows."""
        return self._tier.num_used

    def before_step(self) -> None:
        for result in self._peers.take_results():
            match result:
                case PeerPut():
                    self._put(result)
                case PeerEnd():
                    self._entries.ended(Digest(bytes.fromhex(result.key)))
                case Arrived():
                    self.read_bytes += len(result.payload)
                    self._tier.reads.arrived(result.name, result.payload)
                case PeerUnfit():
                    self._count(result.reason)
                case Missed():
                    self._count(result.reason)
                    self._entries.lost(result.name)
        self._entries.sweep()

    def after_step(self) -> None:
        for key in self._tier.reads.take_asked():
            self._peers.read(key)

    def drop_scope(self, owner: Digest) -> None:
        """A scope was dropped: none of its content is found here any more."""
        self._tier.drop_scope(owner)
        self._tier.take_deletes()

    def close(self) -> None:
        self._peers.close()

    def _count(self, damage: str) -> None:
        reason = f"peer_{damage}"
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def _put(self, found: PeerPut) -> None:
        put, keys = found
        passed = elapsed(put.times.at, self._wall.moment()).seconds
        left = min(put.times.left, MAX_SECONDS) - passed
        if left > 0 and is_chain(put, keys, self._hasher):
            entry = entry_of(put, self._clock.now(), left, passed, is_leased=False)
            self._entries.take_in(entry, keys, put.names)
