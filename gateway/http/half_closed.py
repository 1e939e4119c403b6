"""Clients that have ended their side of a connection, and may still wait for the answer.

`nc` and some health checks do so behind a request, and RFC 9112 (9.6) lets them have the answer.
The end of a client that has left looks the same: both send a FIN. What tells them apart is what
comes back for bytes that are sent to them, since the socket of a client that has left resets the
connection. So bytes that mean nothing are sent: `100 Continue` before an answer has begun, and a
blank between two pieces of a stream.

A client of HTTP/1.0 must not be sent `100 Continue`. The two can't be told apart there before the
answer begins, so one that waits for a turn counts as gone. nginx asks in HTTP/1.0 by default, and
closes its connection when its own client leaves.
"""

import asyncio
import select
from collections.abc import Callable

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
FILLER = "filler"
"""Where a request's state has the bytes that may stand between two pieces of its stream."""

# Most answers begin before the first probe, so most clients see none.
_FIRST_PROBE_SECONDS = 0.1
_LOOK_SECONDS = (0.1, 0.1, 0.3, 0.5, 1.0, 3.0)
"""The waits from a probe to the next one, with a look behind each.

The reset comes a round trip after the probe. Looks have a cost for every client that waits.
"""


class HalfClosed:
    """Probes every five seconds, and looks after each probe whether the client has left."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        probe: Callable[[], bytes],
    ) -> None:
        """`probe` makes the bytes that mean nothing to the client now; none where there are none.

        The transport is aborted when the client has left.
        """
        self._transport = transport
        self._loop = loop
        self._probe = probe
        self._num_looks = 0
        self._poll = select.poll()
        # Without events only a reset is told, not the end of the client's side.
        self._poll.register(transport.get_extra_info("socket").fileno(), 0)
        self._timer = loop.call_later(_FIRST_PROBE_SECONDS, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._poll.poll(0):
            self._transport.abort()
            return
        place = self._num_looks % len(_LOOK_SECONDS)
        if place == 0 and (filling := self._probe()):
            self._transport.write(filling)
        self._num_looks += 1
        self._timer = self._loop.call_later(_LOOK_SECONDS[place], self._look)
