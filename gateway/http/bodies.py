"""Bounds on the bodies of requests: their time, their size, and their bytes in all.

A slow body, and one that there is no room for, is refused where it is read, in the dialect's
envelope like every other failure.
"""

import asyncio
import math
from functools import partial
from types import TracebackType
from typing import Any, Self

from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.base.errors import BodyTimeout, ClientGone, TooLarge
from gateway.limits.bodies import BodyBytes
from gateway.limits.large_bodies import LARGE_BYTES, NO_WAIT, LargeBodies, Wait

BODY_BYTES_PER_SECOND = 16 * 1024
"""A body's deadline moves by a second for each this many bytes.

So a long body gets more time and a trickling one does not (the rule of Apache's
`RequestReadTimeout`).
"""

HAS_COME = "has_come"
"""Where a request's state has a function that tells whether its whole body is here already.

Nothing is to be waited for then, so there is no timer.
"""

_MAX_DIGITS = 16


class Bodies:
    """Reads whole bodies, for routes without middleware. `max_bytes` bounds one body."""

    def __init__(
        self, request_seconds: float, bodies: BodyBytes, large: LargeBodies, max_bytes: int
    ) -> None:
        self._seconds = request_seconds
        self._bodies = bodies
        self._large = large
        self._max_bytes = max_bytes

    def reading(self, scope: Scope) -> "Reading":
        """The body of one request."""
        taken = scope["state"]["taken"] = _Taken(self._bodies, self._large)
        return Reading(scope, taken, self._seconds, self._max_bytes)


class Reading:
    """One body that is read. Its deadline runs from here on. `max_bytes` None is no bound.

    Its bytes count until the context ends.
    """

    def __init__(
        self, scope: Scope, taken: "_Taken", seconds: float, max_bytes: int | None = None
    ) -> None:
        self._scope = scope
        self._taken = taken
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._declared = _declared_bytes(scope)
        self._is_whole = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._taken.give_back()

    async def whole(self, receive: Receive) -> bytes:
        """Raise as `message`."""
        if self._declared > self._max_bytes:
            raise TooLarge
        pieces: list[bytes] = []
        while not self._is_whole:
            if piece := (await self.message(receive)).get("body", b""):
                pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def message(self, receive: Receive) -> Any:
        """The next ASGI message. What comes behind the whole body is passed on.

        Raise BodyTimeout, ClientGone, TooLarge, or as `BodyBytes.take`.
        """
        if self._is_whole:
            return await receive()
        has_come = self._scope["state"].get(HAS_COME)
        if has_come is not None and has_come():
            message: Any = await receive()
        else:
            try:
                async with asyncio.timeout_at(self._deadline):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        if num_bytes := len(message.get("body", b"")):
            workspace = getattr(self._scope.get("user"), "workspace", None) or ""
            wait = self._taken.grow(workspace, num_bytes, self._declared)
            if self._taken.num_read > self._max_bytes:
                raise TooLarge
            if wait.seconds:
                await asyncio.sleep(wait.seconds)
            if wait.refusal is not None:
                raise wait.refusal
            self._deadline += num_bytes / BODY_BYTES_PER_SECOND + wait.seconds
        self._is_whole = not message.get("more_body", False)
        return message


class BodyDeadline:
    """ASGI middleware: an application reads its body through a `Reading`.

    So a body that does not come in time, and one that there is no room for, is refused where it is
    read. A large body beyond its workspace's rate is left in the socket for a while.
    """

    def __init__(
        self, app: ASGIApp, request_seconds: float, bodies: BodyBytes, large: LargeBodies
    ) -> None:
        self.app = app
        self._seconds = request_seconds
        self._bodies = bodies
        self._large = large

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = _Taken(self._bodies, self._large)
        scope.setdefault("state", {})["taken"] = taken
        with Reading(scope, taken, self._seconds) as reading:
            await self.app(scope, partial(reading.message, receive), send)


class _Taken:
    """The bytes of one body in `BodyBytes`: all that its head declares when the first come."""

    def __init__(self, bodies: BodyBytes, large: LargeBodies) -> None:
        self._bodies = bodies
        self._large = large
        self._workspace = ""
        self._num_bytes = self.num_read = 0

    def grow(self, workspace: str, num_bytes: int, declared: int) -> Wait:
        """Raise as `BodyBytes.take`. Return how long to leave the rest in the socket."""
        self.num_read += num_bytes
        before = self._num_bytes
        more = max(declared, self.num_read) - before
        if more <= 0:
            return NO_WAIT
        self._bodies.take(workspace, more)
        self._workspace = workspace
        self._num_bytes += more
        if self._num_bytes <= LARGE_BYTES:
            return NO_WAIT
        uncounted = more if before > LARGE_BYTES else self._num_bytes
        return self._large.take(workspace, uncounted)

    def give_back(self) -> None:
        if self._num_bytes:
            self._bodies.give_back(self._workspace, self._num_bytes)


async def brought_in(scope: Scope, num_bytes: int) -> None:
    """Count bytes that a request names instead of sending them, as if they had come in its body.

    They are held until the request is over. Raise RateLimited or Overloaded.
    """
    taken: _Taken = scope["state"]["taken"]
    wait = taken.grow(scope["user"].workspace, num_bytes, 0)
    if wait.seconds:
        await asyncio.sleep(wait.seconds)
    if wait.refusal is not None:
        raise wait.refusal


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < _MAX_DIGITS:
            return int(value)
    return 0
