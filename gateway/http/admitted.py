"""Which connections may stay: so many in total, and so many of one address without a valid key.

A connection is *proved* once a request on it had a valid key. When there is no room, the oldest
idle one that is not proved makes way, so idle sockets without a key keep nobody out. Where none can
make way the newcomer is refused. A part of the process's descriptors is never given to clients:
engines, the database and the journal have it, and the newcomer until it is refused.
"""

import ipaddress
import resource
from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

MAX_CONNECTIONS = 16_384
_MAX_BACKLOG = 2048
_MAX_LOOKED_AT = 64


class Guest(Protocol):
    """A connection as it is counted."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being read or answered on it."""

    def evict(self) -> None: ...


class Connections:
    def __init__(self, most: int, most_of_address: int) -> None:
        self._most = most
        self._most_of_address = most_of_address
        self._unproved: OrderedDict[Guest, str] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Guest, None]] = {}
        self._all: set[Guest] = set()

    def __len__(self) -> int:
        return len(self._all)

    def enter(self, guest: Guest, address: str) -> bool:
        """Whether the newcomer may stay; another connection may have been evicted for it."""
        group = group_of(address)
        of_address = self._by_address.get(group, OrderedDict())
        if len(of_address) >= self._most_of_address and not self._make_room(of_address):
            return False
        if len(self._all) >= self._most and not self._make_room(self._unproved):
            return False
        self._all.add(guest)
        self._unproved[guest] = group
        self._by_address.setdefault(group, OrderedDict())[guest] = None
        return True

    def prove(self, guest: Guest) -> None:
        """A valid key was shown on it."""
        if (group := self._unproved.pop(guest, None)) is None:
            return
        of_address = self._by_address[group]
        del of_address[guest]
        if not of_address:
            del self._by_address[group]

    def leave(self, guest: Guest) -> None:
        self.prove(guest)
        self._all.discard(guest)

    def _make_room(self, guests: Iterable[Guest]) -> bool:
        for _, guest in zip(range(_MAX_LOOKED_AT), guests, strict=False):
            if guest.is_idle:
                self.leave(guest)
                guest.evict()
                return True
        return False


def group_of(address: str) -> str:
    """What counts as one address: of IPv6 the network of 64 bits, which is one customer's."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network(f"{address}/64", strict=False))
    except ValueError:
        return address


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets the process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_descriptors() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4 * MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else soft


def most_connections(wanted: int, descriptors: int) -> int:
    """`wanted`, or MAX_CONNECTIONS if that is 0; at most three quarters of the descriptors."""
    room = max(descriptors * 3 // 4, 1)
    return min(wanted or MAX_CONNECTIONS, room)


def backlog_for(descriptors: int) -> int:
    """The length of the socket's backlog: an eighth of the descriptors.

    The event loop accepts all waiting connections before it can refuse one.
    """
    return max(16, min(_MAX_BACKLOG, descriptors // 8))
