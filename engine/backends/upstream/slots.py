"""Who is sent to a server next, where it takes so many requests at a time, and into which slot.

Scopes take turns as in the native engine (`engine.schedule.waiting`). A place that is given back
goes to the next waiting request directly, so no request that comes meanwhile overtakes it.

Slots are llama.cpp's: each keeps what was computed in it last. An order goes into the free slot of
its own scope that has most of its prompt; else into the slot that was used least lately, and then
nothing that is in it may be reused, since another scope left it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.cache.digests import TOKEN_BYTES
from engine.schedule.request import SequenceState
from engine.schedule.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class Place:
    slot: int
    may_reuse: bool


@dataclass(slots=True)
class _Slot:
    """`prompt` is the last one's token ids, packed."""

    number: int
    scope: str = ""
    prompt: bytes = b""
    is_busy: bool = False
    last_use: int = 0


class Slots:
    """Pure."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._uses = 0

    def take(self, scope: str, prompt: bytes) -> Place | None:
        """A place for this prompt (`pack`); None while all are busy. To be given back."""
        free = [slot for slot in self._slots if not slot.is_busy]
        if not free:
            return None
        own = [slot for slot in free if slot.scope == scope]
        best = max(own, key=lambda slot: common_length(slot.prompt, prompt), default=None)
        unused = min(free, key=lambda slot: slot.last_use)
        is_poor = best is not None and not common_length(best.prompt, prompt)
        if best is None or (is_poor and not unused.scope):
            best = unused
        may_reuse = best.scope == scope
        self._uses += 1
        best.scope, best.prompt, best.is_busy, best.last_use = scope, prompt, True, self._uses
        return Place(best.number, may_reuse)

    def give_back(self, place: Place) -> None:
        self._slots[place.slot].is_busy = False


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


class Places:
    """Used on one event loop.

    Each hand-over sorts the scopes that wait: at most as many as the engine has requests.
    """

    def __init__(self, num_places: int) -> None:
        self._slots = Slots(num_places)
        self._waiting = WaitingQueue()
        self._granted: dict[SequenceState, asyncio.Future[Place]] = {}
        self.num_taken = 0

    @asynccontextmanager
    async def taken(self, sequence: SequenceState) -> AsyncIterator[Place]:
        """A place for this choice, in its scope's turn, until the context ends.

        The scope is charged what is to be computed when the place is taken, and what was sampled
        when it is given back. Another choice of a request finds the prompt computed.
        """
        query, found = sequence.request.query, sequence.request.found
        place = None if self._waiting else self._slots.take(query.scope, query.digests.packed)
        if place is None:
            place = await self._wait(sequence)
        read = found.read if found is not None else 0
        is_leader = sequence is sequence.request.leader
        self._waiting.charge({query.scope: len(query.tokens) - read if is_leader else 1})
        self.num_taken += 1
        try:
            yield place
        finally:
            self.num_taken -= 1
            self._waiting.charge({query.scope: sequence.num_output})
            self._slots.give_back(place)
            self._hand_on()

    async def _wait(self, sequence: SequenceState) -> Place:
        granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting.add(sequence)
        self._granted[sequence] = granted
        try:
            return await granted
        except asyncio.CancelledError:
            if self._granted.pop(sequence, None) is not None:
                self._waiting.remove(sequence)
            elif not granted.cancelled():
                # It was given a place in the moment of its cancellation.
                self._slots.give_back(granted.result())
            self._hand_on()
            raise

    def _hand_on(self) -> None:
        """Give a free place to the one whose turn it is."""
        for sequence in self._waiting:
            granted = self._granted[sequence]
            if granted.done():
                continue  # cancelled: its own task takes it out
            query = sequence.request.query
            free = self._slots.take(query.scope, query.digests.packed)
            if free is not None:
                self._waiting.remove(sequence)
                del self._granted[sequence]
                granted.set_result(free)
            return
