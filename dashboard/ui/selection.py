"""What the reader has chosen: range, workspace, engine and model; all of it stands in the URL."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

HOUR_SECONDS = 3600
DAY_SECONDS = 86_400
RANGES = {
    "1h": HOUR_SECONDS,
    "6h": 6 * HOUR_SECONDS,
    "24h": DAY_SECONDS,
    "7d": 7 * DAY_SECONDS,
    "30d": 30 * DAY_SECONDS,
}
_WORDS = {
    "1h": "the last hour",
    "6h": "the last 6 hours",
    "24h": "the last 24 hours",
    "7d": "the last 7 days",
    "30d": "the last 30 days",
}
CUSTOM = "custom"
DEFAULT_RANGE = "24h"
ALL = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """`since` and `until` count for the range `custom` alone. None filters nothing."""

    range: str = DEFAULT_RANGE
    since: datetime | None = None
    until: datetime | None = None
    workspace: str | None = None
    engine: str | None = None
    model: str | None = None

    @property
    def refresh_seconds(self) -> int:
        """How often to ask again. A long range changes slowly, so it is asked for less often."""
        seconds = RANGES.get(self.range, 30 * DAY_SECONDS)
        return 5 if seconds <= DAY_SECONDS else 30 if seconds <= RANGES["7d"] else 60

    @property
    def words(self) -> str:
        """The range as part of a sentence."""
        return _WORDS.get(self.range, "the chosen time")

    def span(self, now: datetime) -> tuple[datetime, datetime]:
        """From (inclusive) and to (exclusive).

        The end is rounded up to the refresh, so that all viewers ask the same question.
        """
        if self.range == CUSTOM and self.since is not None and self.until is not None:
            until = max(self.until, self.since + timedelta(minutes=1))
            return self.since, until
        step = self.refresh_seconds
        until = datetime.fromtimestamp((int(now.timestamp()) // step + 1) * step, UTC)
        return until - timedelta(seconds=RANGES.get(self.range, DAY_SECONDS)), until

    def params(self, now: datetime | None = None) -> dict[str, Any]:
        """The query of the admin API."""
        since, until = self.span(now or datetime.now(UTC))
        return {
            "since_ms": int(since.timestamp() * 1000),
            "until_ms": int(until.timestamp() * 1000),
            **self.filters,
        }

    @property
    def filters(self) -> dict[str, Any]:
        return {"workspace": self.workspace, "engine": self.engine, "model": self.model}
