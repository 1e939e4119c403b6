"""Which connections may stay: so many in total, and so many of one address without a valid key.

A connection is *proved* while the last key that was shown on it is valid. When there is no room,
the oldest one that is not proved makes way, whatever it does, so clients without a key keep nobody
out.
Where all are proved the newcomer is refused. A part of the process's descriptors is never given to
clients: engines, the database and the journal have it, and the newcomer until it is refused.
"""

import ipaddress
import resource
from collections import OrderedDict
from typing import Protocol

MAX_CONNECTIONS = 16_384
_MAX_BACKLOG = 2048


class Guest(Protocol):
    """A connection as it is counted."""

    def evict(self) -> None: ...


class Connections:
    def __init__(self, most: int, most_of_address: int) -> None:
        self._most = most
        self._most_of_address = most_of_address
        # The addresses of all, and those that are not proved, the oldest first.
        self._groups: dict[Guest, str] = {}
        self._unproved: OrderedDict[Guest, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[Guest, None]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def enter(self, guest: Guest, address: str) -> bool:
        """Whether the newcomer may stay; another connection may have been evicted for it."""
        group = group_of(address)
        of_address = self._by_address.get(group, OrderedDict())
        if len(of_address) >= self._most_of_address:
            self._evict(of_address)
        if len(self) >= self._most and not self._evict(self._unproved):
            return False
        self._groups[guest] = group
        self.doubt(guest)
        return True

    def prove(self, guest: Guest) -> None:
        """A valid key was shown on it."""
        if guest not in self._unproved:
            return
        del self._unproved[guest]
        group = self._groups[guest]
        del self._by_address[group][guest]
        if not self._by_address[group]:
            del self._by_address[group]

    def doubt(self, guest: Guest) -> None:
        """No valid key was shown on it, or another one behind a valid one."""
        if guest in self._groups and guest not in self._unproved:
            self._unproved[guest] = None
            self._by_address.setdefault(self._groups[guest], OrderedDict())[guest] = None

    def leave(self, guest: Guest) -> None:
        self.prove(guest)
        self._groups.pop(guest, None)

    def _evict(self, guests: OrderedDict[Guest, None]) -> bool:
        """Evict the oldest, and return whether there was one."""
        oldest = next(iter(guests), None)
        if oldest is not None:
            self.leave(oldest)
            oldest.evict()
        return oldest is not None


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
