"""Messages between the parent process and one worker, over a socket that both inherit.

A message is its length in 4 bytes and a MessagePack array: number, name, body. A message without a
number is *told*: nobody waits for an answer. One with a number is *asked*, and is answered under
that number. Messages of one side arrive in the order in which they were sent. Those that are told
in one round of the event loop go out together, at its end or before the next question.
"""

import asyncio
import inspect
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from gateway.base.errors import GatewayError, NotFound, Overloaded
from gateway.base.logs import get_logger

_ANSWER = ""
_FAILED = "!"
_LENGTH = struct.Struct("!I")
MAX_BYTES = 256 << 20
"""Longer than the longest batch of rows. More is no message of ours."""

Handler = Callable[[bytes], Awaitable[object] | object]
"""Takes a body and returns an answer, now or later. A GatewayError is the asking side's too."""
Kind = TypeVar("Kind")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, str, msgspec.Raw]).decode


class Failed(GatewayError):
    """The other side could not do what was asked. `kind` is the class of its error."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Link(asyncio.Protocol):
    """One end. All methods are called from the event loop."""

    def __init__(
        self, handlers: Mapping[str, Handler], lost: Callable[[], None] = lambda: None
    ) -> None:
        """`lost` is called once, when the other process is gone or `close` was called."""
        self._handlers = handlers
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._number = 0
        self._unsent: list[bytes] = []
        self._received = bytearray()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._log = get_logger("link")

    @classmethod
    async def over(
        cls,
        sock: socket.socket,
        handlers: Mapping[str, Handler],
        lost: Callable[[], None] = lambda: None,
    ) -> "Link":
        """A link over a connected socket of the family AF_UNIX."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(handlers, lost), sock=sock)
        return link

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    @property
    def num_unread(self) -> int:
        """Bytes that were sent and that the other side has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def tell(self, name: str, body: object) -> None:
        """Send a message that is not answered. Nothing is sent once the link is lost."""
        self._send(0, name, body)

    async def ask(self, name: str, body: object, kind: type[Kind], seconds: float) -> Kind:
        """Send a message and return its answer.

        Raise Failed as the other side did, and Overloaded where no answer comes in time.
        """
        answer = self.request(name, body)
        try:
            async with asyncio.timeout(seconds):
                return msgspec.msgpack.decode(await answer, type=kind)
        except TimeoutError:
            raise Overloaded from None

    def request(self, name: str, body: object) -> asyncio.Future[msgspec.Raw]:
        """Send a message now. The answer, or its error, comes later."""
        self._number += 1
        number = self._number
        future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        if not self.is_open:
            future.set_exception(Overloaded())
            return future
        self._waiting[number] = future
        future.add_done_callback(lambda _: self._waiting.pop(number, None))
        self._send(number, name, body)
        return future

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no common class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(Overloaded())
        for task in self._tasks:
            task.cancel()
        self._lost()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start = 0
        while len(received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, start)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(received):
                break
            self._take(bytes(received[start + _LENGTH.size : end]))
            start = end
        del received[:start]

    def _send(self, number: int, name: str, body: object) -> None:
        if self._transport is None:
            return
        message = _encode((number, name, body))
        if not (number or self._unsent):
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(_LENGTH.pack(len(message)) + message)
        if number:
            self._flush()

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and self._transport is not None:
            self._transport.write(b"".join(messages))

    def _take(self, message: bytes) -> None:
        number, name, body = _decode(message)
        if name not in (_ANSWER, _FAILED):
            self._handle(number, name, bytes(body))
            return
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if name == _FAILED:
            future.set_exception(Failed(*msgspec.msgpack.decode(body, type=tuple[str, str])))
        else:
            future.set_result(msgspec.Raw(bytes(body)))

    def _handle(self, number: int, name: str, body: bytes) -> None:
        if (handler := self._handlers.get(name)) is None:
            self._fail(number, name, NotFound(name))  # it has not begun yet
            return
        try:
            answer = handler(body)
        except GatewayError as error:
            self._fail(number, name, error)
            return
        if inspect.isawaitable(answer):
            task = asyncio.ensure_future(answer)
            self._tasks.add(task)
            task.add_done_callback(lambda done: self._done(number, name, done))
        elif number:
            self._send(number, _ANSWER, answer)

    def _done(self, number: int, name: str, task: "asyncio.Future[object]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(number, name, error)
        elif number:
            self._send(number, _ANSWER, task.result())

    def _fail(self, number: int, name: str, error: BaseException) -> None:
        if not isinstance(error, GatewayError):
            self._log.error("unhandled", name=name, exc_info=error)
        if number:
            cause = f" ({error.__cause__!r})" if error.__cause__ is not None else ""
            self._send(number, _FAILED, (type(error).__name__, f"{error}{cause}"))
