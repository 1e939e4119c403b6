"""What the server's names stand on: told when a block's content is in memory no more.

A watched block is not held. vLLM tells when it is reused, to one listener a block: the lease
manager passes it on. An equal block that is left is not looked for: names are hints, and the next
request that has this one tells of it again.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.backends.vllm.directive import Directive, Loss, Watch
from engine.backends.vllm.internals import Block, BlockPool, Coordinator, Request


@dataclass(slots=True)
class _Pending:
    request: Request
    watches: deque[Watch]


class Watches:
    """Not thread-safe: everything comes from the scheduler's thread."""

    def __init__(
        self,
        pool: BlockPool,
        coordinator: Coordinator,
        on_reuse: Callable[[Block], None],
    ) -> None:
        """`on_reuse` is the listener that calls `note_reuse`."""
        self._pool = pool
        self._on_reuse = on_reuse
        self._coordinator = coordinator
        self._pending: dict[str, _Pending] = {}
        self._block_of: dict[str, tuple[Block, bytes | None]] = {}
        self._keys_of: dict[int, dict[str, None]] = {}
        self._lost: dict[str, None] = {}

    def arrive(self, request: Request, directive: Directive) -> None:
        if directive.watches:
            watches = deque(sorted(directive.watches, key=lambda watch: watch.tokens))
            self._pending[request.request_id] = _Pending(request, watches)

    def schedule(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """A step was made up: watch the blocks that it hashed."""
        for request_id, pending in list(self._pending.items()):
            scheduled = num_scheduled_tokens.get(request_id)
            if scheduled is None:
                continue
            computed = pending.request.num_computed_tokens + scheduled
            due: list[Watch] = []
            while pending.watches and pending.watches[0].tokens <= computed:
                due.append(pending.watches.popleft())
            if due:
                self._watch(due, pending.request.block_hashes)
            if not pending.watches:
                del self._pending[request_id]

    def end(self, request_id: str) -> None:
        """What it did not get to is not watched."""
        self._pending.pop(request_id, None)

    def take_losses(self) -> list[Loss]:
        """What is gone since the last call and has not come back."""
        lost, self._lost = self._lost, {}
        return [Loss(key=key, reason="evicted") for key in lost]

    def _watch(self, due: Sequence[Watch], block_hashes: Sequence[bytes]) -> None:
        """Watch some places of one prompt, shortest first: they are looked up together."""
        new = [watch for watch in due if not self._is_known(watch.key)]
        if not new:
            return
        blocks, hit = self._find(block_hashes, new[-1].tokens)
        for watch in new:
            block = self._last_of(blocks, watch.tokens) if watch.tokens <= hit else None
            if block is None:
                self._lost[watch.key] = None
            else:
                self._put(watch.key, block)
                self._lost.pop(watch.key, None)

    def _is_known(self, key: str) -> bool:
        known = self._block_of.get(key)
        return known is not None and known[0].block_hash == known[1]

    def _find(self, block_hashes: Sequence[bytes], tokens: int) -> tuple[Sequence[Block], int]:
        """The first group's blocks of what is in memory of a prefix, and how far that goes."""
        hashes = list(block_hashes[: tokens // self._pool.hash_block_size])
        groups, hit, _ = self._coordinator.find_longest_cache_hit(hashes, tokens)
        return groups[0], hit

    def _last_of(self, blocks: Sequence[Block], tokens: int) -> Block | None:
        """The block that ends there, or the nearest before it that is there at all."""
        size = self._coordinator.single_type_managers[0].block_size
        at = min(tokens // size, len(blocks))
        return next((block for block in reversed(blocks[:at]) if not block.is_null), None)

    def _put(self, key: str, block: Block) -> None:
        self._block_of[key] = block, block.block_hash
        keys = self._keys_of.setdefault(block.block_id, {})
        keys[key] = None
        # A reference taken and given back: the way to be told of its reuse.
        self._pool.touch([block])
        self._pool.unpin_blocks([block], self._on_reuse)

    def note_reuse(self, block: Block) -> None:
        """vLLM hands the block out for other content, or empties its cache."""
        keys = self._keys_of.pop(block.block_id, {})
        for key in keys:
            known = self._block_of.get(key)
            if known is not None and known[0] is block:
                del self._block_of[key]
                self._lost[key] = None
