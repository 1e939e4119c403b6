"""Our record of what vLLM holds: the same cache, entries and names as on our own blocks.

A block here mirrors one of vLLM's: its tokens, its names, the leases on it. The connector says
which entries are leased and which blocks are gone. Expiry and look-ups are decided here, by the
rules of `engine.cache`. This module adds only the source of the facts.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from engine.backends.external import MirrorCache, MirrorPool
from engine.backends.vllm.directive import Directive, Held, HoldState, Loss, Report, Want, Watch
from engine.cache.block import Entry
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.ids import Digest
from engine.cache.leases import EndReason
from engine.cache.lookup import longest_hit
from engine.cache.prefix_cache import CacheQuery, Found
from engine.cache.table import BlockTable
from engine.protocol import MissReason

_WATCH = "name:"


class HeldEntries(Entries):
    """Entries whose leases the connector holds. It reports which got one and which lost it."""

    def __init__(self, pool: MirrorPool, *, ttl_scale: float, grace_seconds: float = 0.0) -> None:
        super().__init__(
            pool,
            lease_share=1.0,
            scope_lease_share=1.0,
            idle_lease_share=1.0,
            rank_shares=(1.0, 1.0, 1.0),  # the connector decides
            ttl_scale=ttl_scale,
            grace_seconds=grace_seconds,
        )
        self._states: dict[Digest, HoldState] = {}
        self._removed: list[Digest] = []
        self._unleased: dict[Digest, None] = {}

    def learn(self, held: Iterable[Held]) -> None:
        """What became of a request's wants; of entries that are not written yet, for `write`."""
        self._states = {Digest(bytes.fromhex(one.key)): one.state for one in held}
        for key in self._states:
            entry = self.get(key)
            if entry is not None and not entry.is_broken and not entry.is_leased:
                self._try_lease(entry)

    def lose(self, key: Digest, loss: Loss) -> None:
        """Note an entry that lost its lease or its content in vLLM."""
        entry = self.get(key)
        if entry is None:
            return
        if loss.reason in ("sacrificed", "yielded"):
            if entry.is_leased:
                self.leases.end(entry, "sacrificed" if loss.reason == "sacrificed" else "yielded")
            return
        why = entry.why_broken
        self.end(entry, why, "dropped")
        entry.is_broken = True

    def take_removed(self) -> list[Digest]:
        """The keys of the entries that ended since the last call."""
        removed, self._removed = self._removed, []
        return removed

    def take_unleased(self, is_due: Callable[[Digest], bool]) -> list[Digest]:
        """The keys of lapsed entries that the connector still leases. Others wait until due."""
        due = [key for key in self._unleased if is_due(key)]
        for key in due:
            del self._unleased[key]
        entries = ((key, self.get(key)) for key in due)
        return [key for key, entry in entries if entry is not None and not entry.is_leased]

    def _lapse(self, entry: Entry) -> None:
        if entry.is_leased:
            self._unleased[entry.key] = None
        super()._lapse(entry)

    def _try_lease(self, entry: Entry) -> bool:
        if self._states.get(entry.key) != "leased":
            entry.why_unleased = entry.why_unleased or "over_budget"
            return False
        return super()._try_lease(entry)

    def end(self, entry: Entry, why: MissReason, reason: EndReason | None = None) -> None:
        super().end(entry, why, reason)
        self._removed.append(entry.key)


class HeldCache(MirrorCache):
    """The cache of an engine that computes in vLLM.

    A request is looked up here, asks by its `directive`, and is `admit`ted with the report. A key
    that nobody wants and no entry has any more is to be released: `take_released`.
    """

    entries: HeldEntries

    def __init__(self, pool: MirrorPool, entries: HeldEntries, hasher: ChainHasher) -> None:
        super().__init__(pool, entries, hasher)
        self._wanted: Counter[Digest] = Counter()

    def directive(
        self, request_id: str, query: CacheQuery, found: Found, lease_blocks: int | None
    ) -> Directive:
        """What a request that was looked up asks of the connector. To be settled by `let_off`."""
        wants: dict[Digest, Want] = {}
        for mark in found.marks:
            tokens = mark.tokens
            key = query.digests.at(tokens)
            entry = self.entries.find(query.digests, tokens, query.arrived_at)
            expires_at = query.arrived_at + self.entries.seconds(mark.ttl, mark.seconds)
            wants[key] = _want(key, tokens, expires_at if entry is None else entry.expires_at)
        hit = found.hit
        if hit is not None and hit.key not in wants:
            wants[hit.key] = _want(hit.key, hit.tokens, hit.expires_at)
        self._wanted.update(wants.keys())
        size = self.pool.block_size
        full = sorted({name.tokens // size for name in query.names} - {0})
        watches = [
            Watch(key=_WATCH + query.digests.full[n - 1].hex(), tokens=n * size) for n in full
        ]
        return Directive(
            request_id=request_id,
            scope=query.scope,
            wants=sorted(wants.values(), key=lambda want: want.tokens),
            read=None if hit is None else hit.key.hex(),
            read_tokens=0 if hit is None else hit.tokens,
            lease_blocks=lease_blocks,
            watches=watches,
        )

    def let_off(self, directive: Directive) -> list[Digest]:
        """The request started or never will: the keys that nothing stands on."""
        keys = [Digest(bytes.fromhex(want.key)) for want in directive.wants]
        self._wanted.subtract(keys)
        self._wanted += Counter()  # drops what is zero
        return self._idle(keys)

    def take_released(self) -> list[Digest]:
        """The keys of ended entries that nobody waits for: the connector may let them go."""
        return self._idle(self.entries.take_removed())

    def take_unleased(self) -> list[Digest]:
        """The keys whose leases are over and whose entries are kept for turns that came before.

        One that a request waits for is kept until that request has started: it may hold it anew.
        """
        return self.entries.take_unleased(lambda key: not self._wanted[key])

    def admit(self, query: CacheQuery, found: Found, table: BlockTable, report: Report) -> None:
        """The request has its first token: what it reused, and what the connector holds for it.

        A hit that was lost on the way is none: another entry is read if what was reused covers one.
        """
        if not self._settle(query, found, reused := report.hit_tokens):
            self.let_go(found)

            def covered(tokens: int) -> Entry | None:
                if tokens > reused:
                    return None
                return self.entries.find(query.digests, tokens, query.arrived_at)

            hit = found.hit = longest_hit(query.segments, found.marks, covered)
            found.read = 0 if hit is None else min(hit.tokens, reused)
            found.miss_reason = self._miss_reason(query, found.marks, hit)
            if found.miss_reason is None and hit is None:
                found.miss_reason = "best_effort_evicted"
        states = {Digest(bytes.fromhex(held.key)): held.state for held in report.held}
        written = [
            mark
            for mark in found.marks
            if states.get(query.digests.at(mark.tokens), "none") != "none"
        ]
        self._unwritten = {mark.segment for mark in found.marks if mark not in written}
        found.marks = written
        self.entries.learn(report.held)
        self._mirror(query, table)

    def lose(self, losses: Sequence[Loss]) -> None:
        """What the connector lost, in its order."""
        for loss in losses:
            if loss.key.startswith(_WATCH):
                self.pool.lose(Digest(bytes.fromhex(loss.key.removeprefix(_WATCH))))
            else:
                self.entries.lose(Digest(bytes.fromhex(loss.key)), loss)

    def _idle(self, keys: Iterable[Digest]) -> list[Digest]:
        return [key for key in keys if not self._wanted[key] and self.entries.get(key) is None]


def _want(key: Digest, tokens: int, expires_at: float) -> Want:
    return Want(key=key.hex(), tokens=tokens, expires_at=expires_at)
