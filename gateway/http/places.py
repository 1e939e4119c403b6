"""Which connections may stay, and when requests without a key may begin.

Who shows no key that is known here pays first: with places, and with the loop's time.
"""

import asyncio
import ipaddress
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

PART_OF_KEY = 0.5
"""Of all places, for the connections of one key."""
STRANGERS_SHARE = 0.2
"""Of the loop's time, for requests without a known key while others are answered."""


class Guest(Protocol):
    """A connection as it is counted."""

    def evict(self) -> None: ...


class _Keys:
    """The connections of each key in the order in which they showed it, and the keys by how many
    they have. Each call takes the same time however many there are."""

    def __init__(self) -> None:
        self._guests: dict[str, OrderedDict[Guest, None]] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._guests)

    def count(self, key: str) -> int:
        return len(self._guests.get(key, ()))

    @property
    def most(self) -> int:
        """How many the key has that has the most."""
        return self._most

    def newest_of_most(self) -> Guest:
        key = next(iter(self._by_count[self._most]))
        return next(reversed(self._guests[key]))

    def add(self, key: str, guest: Guest) -> None:
        guests = self._guests.setdefault(key, OrderedDict())
        self._forget_count(key, len(guests))
        guests[guest] = None
        self._note_count(key, len(guests))

    def remove(self, key: str, guest: Guest) -> None:
        guests = self._guests[key]
        self._forget_count(key, len(guests))
        del guests[guest]
        if guests:
            self._note_count(key, len(guests))
        else:
            del self._guests[key]
        while self._most and self._most not in self._by_count:
            self._most -= 1

    def _note_count(self, key: str, count: int) -> None:
        self._by_count.setdefault(count, OrderedDict())[key] = None
        self._most = max(self._most, count)

    def _forget_count(self, key: str, count: int) -> None:
        if count:
            keys = self._by_count[count]
            del keys[key]
            if not keys:
                del self._by_count[count]


class Connections:
    """Which connections may stay: so many in total, of each key PART_OF_KEY of them, and so many of
    one address without a valid key. A connection is *proved* while the last key that was shown on
    it is valid. What a key has beyond its part counts like connections without one.

    When there is no room, the oldest one that is not proved makes way, whatever it does, so clients
    without a key keep nobody out. (The newest of them may be about to show a key.) Where all are
    proved, the newest one of the key that has the most makes way, if that is more than an equal
    part for each key and the newcomer. Else the newcomer is refused."""

    def __init__(self, most: int, most_of_address: int) -> None:
        self._most = most
        self._most_of_address = most_of_address
        self._most_of_key = max(int(most * PART_OF_KEY), 1)
        # The addresses of all; those that are not proved, the oldest first; the keys of the others.
        self._groups: dict[Guest, str] = {}
        self._unproved: OrderedDict[Guest, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Guest, None]] = {}
        self._key_of: dict[Guest, str] = {}
        self._keys = _Keys()

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, guest: Guest, address: str) -> bool:
        """Whether the newcomer may stay; another connection may have been evicted for it."""
        group = group_of(address)
        of_address = self._by_address.get(group, OrderedDict())
        if len(of_address) >= self._most_of_address:
            self._evict(next(iter(of_address)))
        if len(self) >= self._most and not self._make_way():
            return False
        self._groups[guest] = group
        self.doubt(guest)
        return True

    def prove(self, guest: Guest, key: str) -> None:
        """A valid key was shown on it."""
        if guest not in self._groups or self._key_of.get(guest) == key:
            return
        self._take_from_key(guest)
        if self._keys.count(key) >= self._most_of_key:
            self._put_by_address(guest)
            return
        self._take_from_address(guest)
        self._key_of[guest] = key
        self._keys.add(key, guest)

    def doubt(self, guest: Guest) -> None:
        """No valid key was shown on it, or another one behind a valid one."""
        if guest in self._groups:
            self._take_from_key(guest)
            self._put_by_address(guest)

    def leave(self, guest: Guest) -> None:
        self._take_from_key(guest)
        self._take_from_address(guest)
        self._groups.pop(guest, None)

    def _put_by_address(self, guest: Guest) -> None:
        if guest not in self._unproved:
            self._unproved[guest] = None
            self._by_address.setdefault(self._groups[guest], OrderedDict())[guest] = None

    def _take_from_address(self, guest: Guest) -> None:
        if guest not in self._unproved:
            return
        del self._unproved[guest]
        group = self._groups[guest]
        del self._by_address[group][guest]
        if not self._by_address[group]:
            del self._by_address[group]

    def _take_from_key(self, guest: Guest) -> None:
        key = self._key_of.pop(guest, None)
        if key is not None:
            self._keys.remove(key, guest)

    def _make_way(self) -> bool:
        """Evict one, and return whether there was one."""
        if self._unproved:
            self._evict(next(iter(self._unproved)))
            return True
        if self._keys.most <= max(self._most // (len(self._keys) + 1), 1):
            return False
        self._evict(self._keys.newest_of_most())
        return True

    def _evict(self, guest: Guest) -> None:
        self.leave(guest)
        guest.evict()


def group_of(address: str) -> str:
    """What counts as one address: of IPv6 the network of 64 bits, which is one customer's."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address}/64", strict=False))
    except ValueError:
        return address


class Strangers:
    """When requests without a known key begin: one at a time, in turn between addresses. While
    requests with a known key are answered, each is followed by a pause, so that all together take
    STRANGERS_SHARE of the loop's time. What a request takes is its first step, up to where it
    waits: answers without a key wait for nothing."""

    def __init__(self) -> None:
        self._num_known = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._timer: asyncio.Handle | None = None
        self._began = 0.0

    @contextmanager
    def known(self) -> Iterator[None]:
        """A request with a known key is answered."""
        self._num_known += 1
        try:
            yield
        finally:
            self._num_known -= 1

    async def wait(self, address: str) -> None:
        """Until a request of this address may begin."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group_of(address), deque()).append(turn)
        if self._timer is None:
            self._begin_next()
        await turn

    def _begin_next(self) -> None:
        self._timer = None
        turn = self._next()
        if turn is None:
            return
        # These three run behind one another in the loop's next round, with nothing in between.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._note_beginning)
        turn.set_result(None)
        self._timer = loop.call_soon(self._pause)

    def _note_beginning(self) -> None:
        self._began = asyncio.get_running_loop().time()

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        seconds = (loop.time() - self._began) * (1 / STRANGERS_SHARE - 1)
        self._timer = loop.call_later(seconds if self._num_known else 0.0, self._begin_next)

    def _next(self) -> asyncio.Future[None] | None:
        while self._waiting:
            address, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[address] = turns  # behind the other addresses
            if not turn.done():
                return turn
        return None
