"""A token bucket with debt, on a clock that is handed in.

This is own code because a turn's use is known only when it ends: the bucket takes an estimate and
is corrected later, upwards or into debt. throttled-py (3.5) has neither refunds nor debt. It counts
whole seconds of its own clock and loses the fractions of slow refills. `limits` has windows only.
"""

from dataclasses import dataclass

_MINUTE_SECONDS = 60.0
# Refilling in many small steps rounds. A client that waited the announced time must not fail by
# that.
_ROUNDING = 1e-6


@dataclass(slots=True)
class TokenBucket:
    """A bucket that is refilled evenly, `per_minute` in a minute, and holds at most that.

    Every `now` is in seconds on one monotonic clock. An earlier `now` counts as no time.
    """

    per_minute: int
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "TokenBucket":
        return cls(per_minute, float(per_minute), now)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; 0 if it can be now.

        An amount above `per_minute` counts as `per_minute`.
        """
        self._refill(now)
        missing = min(amount, self.per_minute) - self.level
        return missing * _MINUTE_SECONDS / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take `amount`, into debt if necessary. A negative amount gives back."""
        self._refill(now)
        self.level = min(self.level - amount, float(self.per_minute))

    def remaining(self, now: float) -> int:
        self._refill(now)
        return max(0, int(self.level + _ROUNDING))

    def full_in(self, now: float) -> float:
        """Seconds until the bucket is full, if nothing more is taken."""
        return self.wait(self.per_minute, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Set another limit. The used part of the old one stays used, as far as there is a new one.

        A lower limit makes no debt: what was within the old limit would be waited for at the new
        rate, for hours. A debt that there is stays.
        """
        self._refill(now)
        self.level = max(self.level + per_minute - self.per_minute, min(self.level, 0.0))
        self.per_minute = per_minute

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self.at)
        refilled = self.level + elapsed * self.per_minute / _MINUTE_SECONDS
        self.level = min(refilled, float(self.per_minute))
        self.at = max(now, self.at)
