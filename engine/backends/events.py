"""The event log: numbers events, keeps some for replay, and feeds subscribers.

It is used on the event loop's thread. A subscriber that falls behind is ended. Closing the log ends
all subscribers, and any later one.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec

from engine.protocol import Event, EventFrame, Heartbeat, Snapshot

REPLAY_EVENTS = 65_536
MAX_BEHIND = 8_192
HEARTBEAT_SECONDS = 5.0


class EventLog:
    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.last_seq = 0
        self._replay: deque[Event] = deque(maxlen=REPLAY_EVENTS)
        self._subscribers: set[asyncio.Queue[Event | None]] = set()
        self._is_closed = False

    def publish(self, events: Sequence[Event]) -> None:
        for event in events:
            self.last_seq += 1
            numbered = msgspec.structs.replace(event, seq=self.last_seq)
            self._replay.append(numbered)
            for subscriber in list(self._subscribers):
                self._offer(subscriber, numbered)

    def close(self) -> None:
        """End all subscribers, after the events that were published before."""
        self._is_closed = True
        while self._subscribers:
            self._end(next(iter(self._subscribers)))

    async def subscribe(
        self,
        epoch: str | None,
        after: int | None,
        snapshot: Callable[[], Awaitable[Snapshot]],
    ) -> AsyncIterator[EventFrame]:
        """Yield the missed events (or a snapshot), then new ones.

        The stream ends when the log closes or the subscriber is too slow.
        """
        if self._is_closed:
            return
        mine: asyncio.Queue[Event | None] = asyncio.Queue(maxsize=MAX_BEHIND)
        missed = self._since(epoch, after)
        self._subscribers.add(mine)
        try:
            if missed is None:
                base = await snapshot()
                yield base
                last = base.seq
            else:
                for event in missed:
                    yield event
                last = self.last_seq if not missed else missed[-1].seq
            while True:
                try:
                    next_event = await asyncio.wait_for(mine.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield Heartbeat(seq=last)
                    continue
                if next_event is None:
                    return
                if next_event.seq > last:
                    last = next_event.seq
                    yield next_event
        finally:
            self._subscribers.discard(mine)

    def _since(self, epoch: str | None, after: int | None) -> list[Event] | None:
        """The events after `after`, None when they are not all here."""
        if epoch != self.epoch or after is None or after > self.last_seq:
            return None
        first = self._replay[0].seq if self._replay else self.last_seq + 1
        if after + 1 < first:
            return None
        return [event for event in self._replay if event.seq > after]

    def _offer(self, subscriber: "asyncio.Queue[Event | None]", event: Event) -> None:
        if subscriber.qsize() >= MAX_BEHIND - 1:
            self._end(subscriber)
        else:
            subscriber.put_nowait(event)

    def _end(self, subscriber: "asyncio.Queue[Event | None]") -> None:
        """Nothing comes behind this; `_offer` left room for it."""
        self._subscribers.discard(subscriber)
        subscriber.put_nowait(None)
