"""Accepts connections of a socket that several processes share, a few in each millisecond.

The event loop's own way takes all that wait at once, and a process that has just taken one is awake
before the others. So a burst would go to one process. Here each rests after a few connections, and
one that has more connections than another lets that one go first for a millisecond.
"""

import asyncio
import errno
import socket
from collections.abc import Callable

from gateway.base.logs import get_logger
from gateway.base.shared_words import MAX_WORD, make_words, words_at

_NOT_THERE = MAX_WORD
_AT_ONCE = 2
_PAUSE_SECONDS = 0.001
_NO_ROOM_SECONDS = 1.0
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_GONE = (BlockingIOError, InterruptedError, ConnectionAbortedError)


class Board:
    """How many connections each process has, in memory that all of them share."""

    def __init__(self, descriptor: int, num_processes: int) -> None:
        self._counts = words_at(descriptor, num_processes)

    @classmethod
    def made(cls, num_processes: int) -> tuple["Board", int]:
        """A new board, on which nobody serves, and its descriptor."""
        descriptor = make_words(num_processes)
        board = cls(descriptor, num_processes)
        for number in range(1, num_processes + 1):
            board.leave(number)
        return board, descriptor

    def leave(self, number: int) -> None:
        """The process with that number, from 1 on, serves nobody."""
        self._counts[number - 1] = _NOT_THERE

    def tell(self, number: int, num_connections: int) -> bool:
        """Note how many a process has. Return whether another one has fewer."""
        self._counts[number - 1] = num_connections
        return num_connections > min(self._counts)


class Acceptor:
    """A server in uvicorn's sense. The socket stays its owner's."""

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        has_most: Callable[[], bool],
    ) -> None:
        """`has_most`: whether another process has fewer connections than this one."""
        self._has_most = has_most
        listening.setblocking(False)
        self._listening = listening
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False
        self._resume()

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _resume(self) -> None:
        self._has_most()  # others see how many are left
        if not self._is_closed:
            self._loop.add_reader(self._listening, self._wake)

    def _wake(self) -> None:
        self._loop.remove_reader(self._listening)
        if self._has_most():
            self._loop.call_later(_PAUSE_SECONDS, self._accept)
        else:
            self._accept()

    def _accept(self) -> None:
        if self._is_closed:
            return
        seconds = _PAUSE_SECONDS
        try:
            for _ in range(_AT_ONCE):
                self._begin(self._listening.accept()[0])
        except _GONE:
            pass  # another process has it, or the client has left
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            get_logger("gateway").error("no_room_to_accept", error=str(error))
            seconds = _NO_ROOM_SECONDS
        finally:
            self._loop.call_later(seconds, self._resume)

    def _begin(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # the client has left
