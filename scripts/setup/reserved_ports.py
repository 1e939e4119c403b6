"""Ports for servers that tests and benchmarks start: no two processes of a machine get the same.

The kernel gives outgoing connections and sockets bound to port 0 the ports of its ephemeral range.
A port of that range that was free a moment ago may belong to any connection when the server starts,
and again when it starts a second time. The ports here lie outside the range. The process that got
one keeps it until it ends, by a lock on one byte of a file that all processes of a user share.

The standard library is enough to import this module, because scripts/stack.py uses it.
"""

import errno
import fcntl
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Collection
from functools import cache
from pathlib import Path

HOST = "127.0.0.1"
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST = 10_000
LAST = 65_535
# Where the ephemeral range leaves fewer, ports are taken from inside of it.
FEW = 1_000


class Reservations:
    """The ports that this process keeps."""

    def __init__(self, file: Path, candidates: Collection[int]) -> None:
        self._locks = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._candidates = list(candidates)
        self._kept: set[int] = set()
        self._mutex = threading.Lock()

    def take(self, above: Collection[int] = (0,)) -> int:
        """A port P that nobody has, nor P + A for each A of `above`; all are kept.

        Raises OSError (EADDRNOTAVAIL) if there is none.
        """
        # Processes that begin at different places seldom try the same ports.
        begin = secrets.randbelow(len(self._candidates))
        allowed = frozenset(self._candidates)
        with self._mutex:
            for base in self._candidates[begin:] + self._candidates[:begin]:
                ports = [base + number for number in above]
                if allowed.issuperset(ports) and self._keep(ports):
                    return base
        raise OSError(errno.EADDRNOTAVAIL, "no port is free that no other process keeps")

    def _keep(self, ports: list[int]) -> bool:
        """Keep all of these ports or none. Return whether they are kept."""
        locked: list[int] = []
        for port in ports:
            try:
                if port in self._kept:
                    raise BlockingIOError
                fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                locked.append(port)
                with socket.socket() as probe:  # whether a server can listen there now
                    probe.bind((HOST, port))
            except OSError:  # another process keeps it, or listens there
                for locked_port in locked:
                    fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, locked_port)
                return False
        self._kept.update(ports)
        return True


def candidates(file: Path = RANGE_FILE) -> list[int]:
    """The ports that may be reserved. The kernel gives none of them to a socket that names no
    port."""
    try:
        first, last = map(int, file.read_text("ascii").split())
    except (OSError, ValueError):
        first = 49_152
        last = 65_535  # IANA's range
    outside = [port for port in range(FIRST, LAST + 1) if not first <= port <= last]
    return outside if len(outside) >= FEW else list(range(FIRST, LAST + 1))


@cache
def of_this_process() -> Reservations:
    file = Path(tempfile.gettempdir(), f"holdfast-ports-{os.getuid()}")
    return Reservations(file, candidates())
