"""The days that templates write, remembered in the engine for all of its workers.

A prefix whose text has a date is lost at midnight. So the day that a beginning (tools and system
prompt) was first written with stays its day, for as long as a lease on it may live.
"""

from collections import OrderedDict
from collections.abc import Callable
from datetime import date

from engine.clock import Clock
from engine.text.rendered import DatedBeginning, KnownDays

MAX_BEGINNINGS = 16_384
MAX_SCOPE_BEGINNINGS = 1_024


class SessionDays:
    """Beginnings by scope, the least recently used forgotten first; for one thread.

    `today` is asked at each request. A beginning is forgotten when it was not used for `seconds`
    of `clock`.
    """

    def __init__(self, clock: Clock, today: Callable[[], date], *, seconds: float) -> None:
        self._clock = clock
        self._today = today
        self._seconds = seconds
        # By beginning: its day, and until when that is remembered.
        self._scopes: OrderedDict[str, OrderedDict[bytes, tuple[str, float]]] = OrderedDict()
        self._num_days = 0

    def __len__(self) -> int:
        return self._num_days

    def known(self, scope: str) -> KnownDays:
        """What a worker must know to render a prompt of this scope."""
        now, today = self._clock.now(), self._today().isoformat()
        days = self._scopes.get(scope, OrderedDict())
        return KnownDays(
            today,
            {one: day for one, (day, until) in days.items() if day != today and until > now},
        )

    def note(self, scope: str, used: DatedBeginning, seconds: float = 0.0) -> None:
        """A prompt was rendered. Its leases end within `seconds`, or within the usual time."""
        now, day = self._clock.now(), used.day
        until = now + max(self._seconds, seconds)
        days = self._scopes.setdefault(scope, OrderedDict())
        self._scopes.move_to_end(scope)
        known = days.pop(used.beginning, None)
        if known is None:
            self._num_days += 1
        elif known[1] > now:
            day, until = known[0], max(until, known[1])
        days[used.beginning] = day, until
        if len(days) > MAX_SCOPE_BEGINNINGS:
            self._forget(scope)
        while self._num_days > MAX_BEGINNINGS:
            self._forget(next(iter(self._scopes)))

    def _forget(self, scope: str) -> None:
        self._scopes[scope].popitem(last=False)
        self._num_days -= 1
        if not self._scopes[scope]:
            del self._scopes[scope]
