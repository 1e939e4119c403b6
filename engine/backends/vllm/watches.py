"""What the server's names stand on: told when a block's content is in memory no more.

A watched block is not held. vLLM tells when it is reused, to one listener a block: the lease
manager passes it on. An equal block that is left is not looked for: names are hints, and the next
request that has this one tells of it again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.backends.vllm.directive import Directive, Loss, Watch
from engine.backends.vllm.internals import Block, BlockPool, Coordinator, Request


@dataclass(slots=True)
class _Pending:
    request: Request
    watches: list[Watch]


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
            watches = sorted(directive.watches, key=lambda watch: watch.tokens)
            self._pending[request.request_id] = _Pending(request, watches)

    def schedule(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """A step was made up: watch the blocks that it hashed."""
        for request_id, pending in list(self._pending.items()):
            scheduled = num_scheduled_tokens.get(request_id)
            if scheduled is None:
                continue
            computed = pending.request.num_computed_tokens + scheduled
            while pending.watches and pending.watches[0].tokens <= computed:
                watch = pending.watches.pop(0)
                self._watch(watch, pending.request.block_hashes)
            if not pending.watches:
                del self._pending[request_id]

    def end(self, request_id: str) -> None:
        """What it did not get to is not watched."""
        self._pending.pop(request_id, None)

    def take_losses(self) -> list[Loss]:
        """What is gone since the last call and has not come back."""
        lost, self._lost = self._lost, {}
        return [Loss(key=key, reason="evicted") for key in lost]

    def _watch(self, watch: Watch, block_hashes: Sequence[bytes]) -> None:
        known = self._block_of.get(watch.key)
        if known is not None and known[0].block_hash == known[1]:
            return
        block = self._find(block_hashes, watch.tokens)
        if block is None:
            self._lost[watch.key] = None
            return
        self._put(watch.key, block)
        self._lost.pop(watch.key, None)

    def _find(self, block_hashes: Sequence[bytes], tokens: int) -> Block | None:
        """The last block of a prefix that is in memory as a whole."""
        hashes = list(block_hashes[: tokens // self._pool.hash_block_size])
        groups, hit, _ = self._coordinator.find_longest_cache_hit(hashes, tokens)
        if hit < tokens:
            return None
        return next((block for block in reversed(groups[0]) if not block.is_null), None)

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
