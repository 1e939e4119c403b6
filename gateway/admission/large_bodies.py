"""How fast one workspace may send large bodies. Pure but for the clock that is handed in.

A large body takes tens of milliseconds of the interpreter's lock, whatever comes of it. So the
bytes of large bodies have a rate. A body beyond it is not refused at once, since its client would
send it again at once. It is left in the socket until the rate has room, and only a long wait is
refused.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission.bucket import TokenBucket
from gateway.base.errors import RateLimited

LARGE_BYTES = 1 << 20
MAX_WAIT_SECONDS = 10.0
_MAX_WORKSPACES = 10_000


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a body is left in the socket. `refusal` is the end of a wait that is too long."""

    seconds: float = 0.0
    refusal: RateLimited | None = None


NO_WAIT = Wait()


class LargeBodies:
    def __init__(self, bytes_per_minute: int, monotonic: Callable[[], float]) -> None:
        self._per_minute = bytes_per_minute
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, workspace: str, num_bytes: int) -> Wait:
        """Count a large body, and say how long to leave it. A refused one is not counted."""
        now = self._monotonic()
        bucket = self._buckets.get(workspace)
        if bucket is None:
            bucket = self._buckets[workspace] = TokenBucket.full(self._per_minute, now)
            if len(self._buckets) > _MAX_WORKSPACES:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(workspace)
        seconds = bucket.wait(num_bytes, now)
        if seconds > MAX_WAIT_SECONDS:
            what = f"bytes of bodies above {LARGE_BYTES} per minute"
            refusal = RateLimited(what, self._per_minute, math.ceil(seconds - MAX_WAIT_SECONDS))
            return Wait(MAX_WAIT_SECONDS, refusal)
        bucket.take(num_bytes, now)
        return Wait(seconds)
