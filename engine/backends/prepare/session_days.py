"""The days that templates write, remembered in the engine for all of its workers.

A prefix whose text has a date is lost at midnight. So the day that a beginning (tools and system
prompt) was first written with stays its day, for as long as a lease on it may live.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from engine.clock import Clock
from engine.text.rendered import DatedBeginning, KnownDays

MAX_BEGINNINGS = 16_384
MAX_SCOPE_BEGINNINGS = 1_024


@dataclass(slots=True)
class _Kept:
    day: str
    until: float


class SessionDays:
    """Beginnings by scope, the least recently used forgotten first; for one thread.

    `today` is asked at each request. A beginning is forgotten when it was not used for `seconds`
    of `clock`.
    """

    def __init__(self, clock: Clock, today: Callable[[], date], *, seconds: float) -> None:
        self._clock = clock
        self._today = today
        self._seconds = seconds
        self._scopes: OrderedDict[bytes, OrderedDict[bytes, _Kept]] = OrderedDict()
        self._num_kept = 0

    def __len__(self) -> int:
        return self._num_kept

    def known(self, scope: bytes) -> KnownDays:
        """What a worker must know to render a prompt of this scope."""
        now, today = self._clock.now(), self._today().isoformat()
        kept = self._scopes.get(scope, OrderedDict())
        return KnownDays(
            today,
            {
                beginning: one.day
                for beginning, one in kept.items()
                if one.day != today and one.until > now
            },
        )

    def note(self, scope: bytes, used: DatedBeginning, seconds: float = 0.0) -> None:
        """A prompt was rendered. Its leases end within `seconds`, or within the usual time."""
        now = self._clock.now()
        until = now + max(self._seconds, seconds)
        kept = self._scopes.setdefault(scope, OrderedDict())
        self._scopes.move_to_end(scope)
        one = kept.pop(used.beginning, None)
        if one is None:
            self._num_kept += 1
        elif one.until > now:
            used, until = DatedBeginning(used.beginning, one.day), max(until, one.until)
        kept[used.beginning] = _Kept(used.day, until)
        self._bound(kept)

    def _bound(self, kept: OrderedDict[bytes, _Kept]) -> None:
        """Forget what is beyond the bounds: of the scope just used, then of the longest unused."""
        if len(kept) > MAX_SCOPE_BEGINNINGS:
            kept.popitem(last=False)
            self._num_kept -= 1
        while self._num_kept > MAX_BEGINNINGS:
            scope = next(iter(self._scopes))
            self._scopes[scope].popitem(last=False)
            self._num_kept -= 1
            if not self._scopes[scope]:
                del self._scopes[scope]
