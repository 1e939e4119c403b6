"""The recurrent state of a sequence, for models with linear layers, in blocks of the pool.

A linear layer keeps no keys and values. It keeps one state, which every token changes. So a prompt
can continue from a prefix only where a state was kept: at a breakpoint. A state takes `num_blocks`
blocks of the pool. They stand behind an entry's other blocks, so leases, tiers, the store and the
reports count their bytes as they count all others.

A kept state is never written again (copy-on-write): a sequence that continues from it writes to
other blocks. The tokens of a kept block are a marker that no prompt can have, so a state has a
place in the chain of digests. An entry at the very end of its prompt has the state one token
before, because a prompt's last token is always computed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.cache.block import Block, Entry
from engine.cache.digests import pack
from engine.cache.ids import BlockId, Digest
from engine.cache.pool import BlockPool
from engine.sizing import blocks_for

_AT_END = pack([2**32 - 1])
_ONE_BEFORE = pack([2**32 - 2])


class StateMove(NamedTuple):
    """Where a step reads a sequence's state, and where it writes it."""

    # None before the first token.
    source: Sequence[BlockId] | None
    target: Sequence[BlockId]


def state_position(entry: Entry) -> int:
    """The number of an entry's tokens that its state has taken in."""
    return entry.tokens - entry.blocks[-1].tokens.startswith(_ONE_BEFORE)


def split_states(packed: bytes) -> int:
    """Where the markers of states begin in an entry's token ids, in bytes."""
    # No four bytes of ids below 2**31 are a marker's, wherever they begin.
    starts = (packed.find(marker) for marker in (_AT_END, _ONE_BEFORE))
    return min((start for start in starts if start >= 0), default=len(packed))


class RecurrentState:
    """The state behind a table's computed tokens. It has one reference on each block."""

    def __init__(
        self, pool: BlockPool, root: Digest, num_blocks: int, plan: Mapping[int, int]
    ) -> None:
        self._pool = pool
        self._root = root
        self._num_blocks = num_blocks
        # The positions at which the state is kept, with the tokens of their entries.
        self.plan = dict(plan)
        # The kept states by position. The state that was read is one of them.
        self.kept: dict[int, list[Block]] = {}
        self._current: list[Block] = []
        # For states that are still to be written.
        self._spare: list[Block] = []
        # The position of the state that was read, as long as it is the current one.
        self._read: int | None = None

    def num_to_fill(self, position: int) -> int:
        """How many blocks a sequence needs to continue from here.

        These are the blocks of its state, and of each state that will be kept behind `position`.
        """
        return self._num_blocks * (1 + sum(place > position for place in self.plan))

    def fill(self, position: int, state: Sequence[Block]) -> None:
        """Go on from a state, whose blocks have a reference for this table. There is room."""
        for _ in range(self.num_to_fill(position)):
            self._spare.append(self._pool.allocate(0, self._root, is_state=True))
        self._current = list(state)
        self._read = position if state else None

    def move(self) -> StateMove:
        """What the next step reads and writes. `make_room` was called before."""
        target = self._current if self._is_own else self._spare[: self._num_blocks]
        source = [block.block_id for block in self._current]
        return StateMove(source or None, [block.block_id for block in target])

    def moved(self, num_tokens: int) -> None:
        """A step has computed up to `num_tokens`. What was read is kept."""
        if not self._is_own:
            if self._read is not None:
                self.kept[self._read] = self._current
                self._read = None
            else:
                self._pool.release_chain(self._current)
            self._current = self._spare[: self._num_blocks]
            del self._spare[: self._num_blocks]
        tokens = self.plan.get(num_tokens)
        if tokens is None:
            return
        marker = (_AT_END if tokens == num_tokens else _ONE_BEFORE) * self._pool.block_size
        for place, block in enumerate(self._current, blocks_for(tokens, self._pool.block_size)):
            block.index = place
            self._pool.append(block, marker)
            self._pool.acquire(block)
        self.kept[num_tokens] = list(self._current)

    @property
    def num_lacking(self) -> int:
        """The blocks that `make_room` allocates."""
        has_target = self._is_own or len(self._spare) >= self._num_blocks
        return 0 if has_target else self._num_blocks

    def make_room(self) -> None:
        for _ in range(self.num_lacking):
            self._spare.append(self._pool.allocate(0, self._root, is_state=True))

    def of_entry(self, tokens: int) -> list[Block] | None:
        """The kept state of the planned entry at these tokens."""
        places = (place for place, entry_tokens in self.plan.items() if entry_tokens == tokens)
        return next((self.kept[place] for place in places if place in self.kept), None)

    def fork(self, position: int) -> "RecurrentState":
        """The state at a kept position, or at the present one, for another sequence."""
        forked = RecurrentState(self._pool, self._root, self._num_blocks, {})
        if position:
            forked._current = list(self.kept.get(position, self._current))
        for block in forked._current:
            self._pool.acquire(block)
        return forked

    def let_go(self) -> None:
        """The entries are written: nothing more is kept."""
        for blocks in self.kept.values():
            self._pool.release_chain(blocks)
        self.kept = {}
        self.plan = {}

    def release(self) -> None:
        """Give every reference back."""
        for blocks in (*self.kept.values(), self._spare, self._current):
            self._pool.release_chain(blocks)
        self.kept = {}
        self._spare = []
        self._current = []
        self._read = None

    @property
    def _is_own(self) -> bool:
        """Whether the state may be changed in place. All its blocks have equal reference counts."""
        return bool(self._current) and (
            self._current[0].ref_count == 1 and not self._current[0].tokens
        )
