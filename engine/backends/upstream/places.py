"""Who is sent to a server next, where it takes so many requests at a time.

Scopes take turns as in the native engine (`engine.schedule.waiting`). A place that is given back
goes to the next waiting request directly, so no request that comes meanwhile overtakes it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.backends.upstream.gate import Place, Slots
from engine.schedule.request import SequenceState
from engine.schedule.waiting import WaitingQueue


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
        is_leader = sequence is sequence.request.leader
        read = found.read if found is not None else 0
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
            if free is None:
                return
            self._waiting.remove(sequence)
            del self._granted[sequence]
            granted.set_result(free)
            return
