"""A token bucket with debt, on a clock that is handed in.

Own code, since what a turn used is known only when it ends: the bucket takes an estimate and is put
right later, upwards or into debt. throttled-py (3.5) has neither refunds nor debt, counts whole
seconds of a clock of its own and loses the fractions of slow refills; `limits` has windows only.
"""

from dataclasses import dataclass

_MINUTE_SECONDS = 60.0
# Refilling in many small steps rounds; who waited as long as was said must not miss by that.
_ROUNDING = 1e-6


@dataclass(slots=True)
class TokenBucket:
    """Refilled evenly, `per_minute` in a minute, and never above that.

    Every `now` is in seconds on one monotonic clock; one that went back counts as no time.
    """

    per_minute: int
    level: float
    at: float

    @classmethod
    def full(cls, per_minute: int, now: float) -> "TokenBucket":
        return cls(per_minute, float(per_minute), now)

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken, 0 where it can be now; more than all of it never
        can, so that counts as all of it."""
        self._refill(now)
        missing = min(amount, self.per_minute) - self.level
        return missing * _MINUTE_SECONDS / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take it, into debt if need be; a negative amount gives back."""
        self._refill(now)
        self.level = min(self.level - amount, float(self.per_minute))

    def remaining(self, now: float) -> int:
        self._refill(now)
        return max(0, int(self.level + _ROUNDING))

    def full_in(self, now: float) -> float:
        """Seconds until it is full if nothing more is taken."""
        return self.wait(self.per_minute, now)

    def resize(self, per_minute: int, now: float) -> None:
        """Another limit; what was used of the old one stays used."""
        self._refill(now)
        self.level += per_minute - self.per_minute
        self.per_minute = per_minute

    def _refill(self, now: float) -> None:
        elapsed = max(0.0, now - self.at)
        refilled = self.level + elapsed * self.per_minute / _MINUTE_SECONDS
        self.level = min(refilled, float(self.per_minute))
        self.at = max(now, self.at)
