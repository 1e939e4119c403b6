"""The days that templates write, kept from a beginning's first use on."""

from collections import OrderedDict
from collections.abc import Callable
from datetime import date

from engine.clock import Clock
from engine.text.rendered import DatedBeginning, KnownDays

# The most beginnings of all scopes together, and of one scope.
MAX_BEGINNINGS = 16_384
MAX_SCOPE_BEGINNINGS = 1_024


class SessionDays:
    """The days that templates write, remembered in the engine for all of its workers.

    A prefix with a date in its text would be lost at midnight. So a beginning (tools and system
    prompt) keeps the day of its first use, for as long as a lease on it may live.
    """

    def __init__(
        self,
        clock: Clock,
        today: Callable[[], date],
        *,
        seconds: float,
        grace_seconds: float = 0.0,
    ) -> None:
        """`today` is called at each request.

        A beginning is forgotten when it was not used for `seconds` of `clock`, or for the life of
        its leases and `grace_seconds` more if that is longer. Beyond the bounds the least recently
        used beginnings are forgotten first.
        """
        self._clock = clock
        self._today = today
        self._seconds = seconds
        self._grace_seconds = grace_seconds
        # By beginning: its day, and until when the day is remembered.
        self._scopes: OrderedDict[str, OrderedDict[bytes, tuple[str, float]]] = OrderedDict()
        self._num_days = 0

    def known(self, scope: str) -> KnownDays:
        """The days that a worker needs to render a prompt of this scope."""
        now = self._clock.now()
        today = self._today().isoformat()
        days = self._scopes.get(scope, OrderedDict())
        earlier = {
            beginning: day
            for beginning, (day, until) in days.items()
            if day != today and until > now
        }
        return KnownDays(today, earlier)

    def note(self, scope: str, used: DatedBeginning, seconds: float = 0.0) -> None:
        """Note that a prompt was rendered with a day. Its leases end within `seconds`."""
        now = self._clock.now()
        day = used.day
        until = now + max(self._seconds, seconds + self._grace_seconds)
        days = self._scopes.setdefault(scope, OrderedDict())
        self._scopes.move_to_end(scope)
        known = days.pop(used.beginning, None)
        self._num_days += known is None
        if known is not None and known[1] > now:
            day = known[0]
            until = max(until, known[1])
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
