"""Into which slot of a server a request goes, and when: it takes so many requests at a time.

Requests wait in the order in which they came; taking turns by workspace is the gateway's queue's
part. Slots are llama.cpp's: each keeps what was computed in it last. An order goes into the free
slot of its own scope that has most of its prompt; else into the slot that was used least lately,
and then nothing that is in it may be reused, since another scope left it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.cache.digests import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Place:
    slot: int
    may_reuse: bool


ANYWHERE = Place(0, True)


@dataclass(slots=True)
class _Slot:
    """`prompt` is the last one's token ids, packed."""

    number: int
    scope: str = ""
    prompt: bytes = b""
    is_busy: bool = False
    last_use: int = 0


class Slots:
    """Used on one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._free = asyncio.Semaphore(num_slots)
        self._uses = 0

    @property
    def num_taken(self) -> int:
        return sum(slot.is_busy for slot in self._slots)

    @asynccontextmanager
    async def taken(self, scope: str, prompt: bytes) -> AsyncIterator[Place]:
        """A place for this prompt (`pack`), until the context ends."""
        async with self._free:
            free = [slot for slot in self._slots if not slot.is_busy]
            own = [slot for slot in free if slot.scope == scope]
            best = max(own, key=lambda slot: common_length(slot.prompt, prompt), default=None)
            unused = min(free, key=lambda slot: slot.last_use)
            is_poor = best is not None and not common_length(best.prompt, prompt)
            if best is None or (is_poor and not unused.scope):
                best = unused
            may_reuse = best.scope == scope
            self._uses += 1
            best.scope, best.prompt, best.is_busy, best.last_use = scope, prompt, True, self._uses
            try:
                yield Place(best.number, may_reuse)
            finally:
                best.is_busy = False


def common_length(one: bytes, other: bytes) -> int:
    """How many tokens two packed prompts begin with together.

    Bisection: each token is compared once or twice, outside of the interpreter. This runs on the
    engine's event loop for every free slot of a scope.
    """
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
