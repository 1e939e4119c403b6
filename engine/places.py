"""Which connections may stay at either server, and when the requests of strangers begin.

Connections have *holders*: at the gateway an API key, at the engine the address of a gateway that
showed the secret. A *stranger* shows nothing that is known here. If places or the loop's time are
scarce, strangers get less before holders do.
"""

import asyncio
import ipaddress
from collections import OrderedDict, deque
from typing import NamedTuple, Protocol

STRANGERS_SHARE = 0.2
"""The part of the loop's time for requests of strangers, while others are answered."""
NEWCOMERS_SHARE = 1 / 16
"""The part of all places for connections that are not proved (yet)."""
_PLACES_SHARE = 3 / 4
"""The part of the process's descriptors for connections that have a place. Files and the process's
own connections need others."""
_SOCKETS_SHARE = 13 / 16
"""The part of the process's descriptors for those, and for connections that are told that they are
refused."""


class Split(NamedTuple):
    """Parts of a process's descriptors."""

    # For connections that have a place.
    places: int
    # For those, and for connections that are told that they are refused.
    sockets: int


def split(descriptors: int) -> Split:
    return Split(
        places=max(int(descriptors * _PLACES_SHARE), 1),
        sockets=max(int(descriptors * _SOCKETS_SHARE), 1),
    )


class Guest(Protocol):
    """A connection as it is counted."""

    def evict(self) -> None: ...


class _Holders:
    """The connections of each holder, in the order in which they were proved.

    Holders are ordered by the number of their connections. Each call takes constant time.
    """

    def __init__(self) -> None:
        self._guests: dict[str, OrderedDict[Guest, None]] = {}
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._guests)

    def count(self, holder: str) -> int:
        return len(self._guests.get(holder, ()))

    @property
    def most(self) -> int:
        """The largest number of connections that any holder has."""
        return self._most

    def newest_of_most(self) -> Guest:
        holder = next(iter(self._by_count[self._most]))
        return next(reversed(self._guests[holder]))

    def add(self, holder: str, guest: Guest) -> None:
        guests = self._guests.setdefault(holder, OrderedDict())
        self._forget_count(holder, len(guests))
        guests[guest] = None
        self._note_count(holder, len(guests))

    def remove(self, holder: str, guest: Guest) -> None:
        guests = self._guests[holder]
        self._forget_count(holder, len(guests))
        del guests[guest]
        if guests:
            self._note_count(holder, len(guests))
        else:
            del self._guests[holder]
        while self._most and self._most not in self._by_count:
            self._most -= 1

    def _note_count(self, holder: str, count: int) -> None:
        self._by_count.setdefault(count, OrderedDict())[holder] = None
        self._most = max(self._most, count)

    def _forget_count(self, holder: str, count: int) -> None:
        if count:
            holders = self._by_count[count]
            del holders[holder]
            if not holders:
                del self._by_count[count]


class Connections:
    """Which connections may stay.

    A connection is *proved* while the last request on it showed who holds it. What a holder has
    beyond its part counts like connections that are not proved.

    A proved connection never has one of the places of NEWCOMERS_SHARE. So if no place is free, the
    oldest connection that is not proved makes way, whatever it does. Strangers keep nobody out. (A
    newer connection may be about to show something.)

    If all other places are taken, a newly proved connection gets the place of another one. That is
    the newest connection of the holder that has the most, if it has more than an equal part for
    each holder. Otherwise the new connection stays as one that is not proved.
    """

    def __init__(self, most: int, most_of_address: int, part_of_holder: float) -> None:
        """`most` connections may stay in total.

        Each holder may have `part_of_holder` of them, 0 to 1. Of the connections that are not
        proved each address may have `most_of_address`.
        """
        self._most = most
        self._most_of_address = most_of_address
        self._most_proved = max(most - max(int(most * NEWCOMERS_SHARE), 1), 1)
        self._most_of_holder = max(int(most * part_of_holder), 1)
        # The address of each connection.
        self._groups: dict[Guest, str] = {}
        # Those that are not proved, the oldest first, all and by address.
        self._unproved: OrderedDict[Guest, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Guest, None]] = {}
        # Who holds those that are proved.
        self._holder_of: dict[Guest, str] = {}
        self._holders = _Holders()

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, guest: Guest, address: str) -> bool:
        """Whether the newcomer may stay. Another connection may be evicted for it."""
        group = group_of(address)
        of_address = self._by_address.get(group, OrderedDict())
        if len(of_address) >= self._most_of_address:
            self._evict(next(iter(of_address)))
        if len(self) >= self._most:
            if not self._unproved:
                return False
            self._evict(next(iter(self._unproved)))
        self._groups[guest] = group
        self.doubt(guest)
        return True

    def prove(self, guest: Guest, holder: str) -> None:
        """A request on it showed who holds it. Another connection may be evicted for it."""
        if guest not in self._groups or self._holder_of.get(guest) == holder:
            return
        self._take_from_holder(guest)
        if self._has_room_for(holder):
            self._take_from_address(guest)
            self._holder_of[guest] = holder
            self._holders.add(holder, guest)
        else:
            self._put_by_address(guest)

    def doubt(self, guest: Guest) -> None:
        """A request on it did not show who holds it."""
        if guest in self._groups:
            self._take_from_holder(guest)
            self._put_by_address(guest)

    def leave(self, guest: Guest) -> None:
        self._take_from_holder(guest)
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

    def _take_from_holder(self, guest: Guest) -> None:
        holder = self._holder_of.pop(guest, None)
        if holder is not None:
            self._holders.remove(holder, guest)

    def _has_room_for(self, holder: str) -> bool:
        """Whether one more connection of this holder may be proved.

        The newest connection of another holder may be evicted for it.
        """
        count = self._holders.count(holder)
        if count >= self._most_of_holder:
            return False
        if len(self._holder_of) < self._most_proved:
            return True
        num_holders = len(self._holders) + (count == 0)
        equal_part = max(self._most_proved // num_holders, 1)
        if self._holders.most <= max(equal_part, count + 1):
            return False
        self._evict(self._holders.newest_of_most())
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


class RefusedConnections:
    """Connections that lost their place, or never had one, while they are told so.

    If they take too many descriptors, the first of them is cut off, because it has had the most
    time to read its answer.
    """

    def __init__(self, most_sockets: int) -> None:
        self._most_sockets = most_sockets
        self._transports: OrderedDict[asyncio.Transport, None] = OrderedDict()

    def add(self, transport: asyncio.Transport) -> None:
        self._transports[transport] = None

    def leave(self, transport: asyncio.Transport) -> None:
        self._transports.pop(transport, None)

    def make_room(self, num_sockets: int) -> None:
        """Cut a refused connection off if all connections have too many sockets."""
        if num_sockets > self._most_sockets and self._transports:
            oldest, _ = self._transports.popitem(last=False)
            oldest.abort()


class Places:
    """The places of all connections to one server, and of those that are told of a refusal."""

    def __init__(self, connections: Connections, refused_connections: RefusedConnections) -> None:
        self.connections = connections
        self._refused_connections = refused_connections

    def enter(self, guest: Guest, address: str, num_sockets: int) -> bool:
        """Whether a new connection may stay. `num_sockets` are those of all connections."""
        self._refused_connections.make_room(num_sockets)
        return self.connections.enter(guest, address)

    def note_refusal(self, transport: asyncio.Transport) -> None:
        """A connection without a place is told so."""
        self._refused_connections.add(transport)

    def leave(self, guest: Guest, transport: asyncio.Transport) -> None:
        """A connection has ended."""
        self.connections.leave(guest)
        self._refused_connections.leave(transport)


class RoundRobin:
    """The waiting requests, by group and by holder.

    Groups take turns, and so do the holders within a group. A holder's requests go in their order.
    A group with many holders gets as much as a group with a single holder.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]]
        self._waiting = OrderedDict()

    def join(self, group: str, holder: str = "") -> asyncio.Future[None]:
        """A future that has a result when its turn has come. A cancelled one is passed over."""
        turn = asyncio.get_running_loop().create_future()
        holders = self._waiting.setdefault(group, OrderedDict())
        holders.setdefault(holder, deque()).append(turn)
        return turn

    def next(self) -> asyncio.Future[None] | None:
        """Take the future whose turn it is; None if nobody waits."""
        while self._waiting:
            group, holders = self._waiting.popitem(last=False)
            holder, turns = holders.popitem(last=False)
            turn = turns.popleft()
            if turns:
                holders[holder] = turns  # behind the group's other holders
            if holders:
                self._waiting[group] = holders  # behind the other groups
            if not turn.done():
                return turn
        return None


class Known:
    """Counts the requests that are answered inside this context."""

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> None:
        self.number += 1

    def __exit__(self, *failure: object) -> None:
        self.number -= 1


class Strangers:
    """When requests of strangers begin: one at a time, in turn between addresses.

    While requests with a known key or secret are answered, a pause follows each stranger's request,
    so that strangers together take STRANGERS_SHARE of the loop's time. Only a request's first step
    is measured, up to its first wait, because answers to strangers wait for nothing.
    """

    def __init__(self) -> None:
        # A context: entered while a request that is no stranger's is answered.
        self.known = Known()
        self._waiting = RoundRobin()
        self._timer: asyncio.Handle | None = None
        self._began = 0.0

    async def wait(self, address: str) -> None:
        """Until a request of this address may begin."""
        turn = self._waiting.join(group_of(address))
        if self._timer is None:
            self._begin_next()
        await turn

    def _begin_next(self) -> None:
        self._timer = None
        turn = self._waiting.next()
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
        self._timer = loop.call_later(seconds if self.known.number else 0.0, self._begin_next)
