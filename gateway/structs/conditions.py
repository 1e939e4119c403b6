"""What is wrong now, as `/readyz`, the admin API, the dashboard and the command line say it."""

from datetime import UTC, datetime
from typing import Literal

import msgspec

Severity = Literal["critical", "warning", "info"]
ConditionKind = Literal[
    "engine_not_answering",
    "engine_starting",
    "engine_failing",
    "engine_out_of_memory",
    "engine_memory_full",
    "engine_memory_nearly_full",
    "engine_preempting",
    "engine_draining",
    "engine_breaker_open",
    "engine_counts_kept",
    "engine_not_isolated",
    "slots_in_use",
    "purge_pending",
    "counts_unclaimed",
    "another_model",
    "another_adapter",
    "leases_full",
    "leases_ended_early",
    "store_off",
    "store_not_written",
    "store_full",
    "loop_failing",
    "journal_damaged",
    "journal_full",
    "journal_nearly_full",
    "journal_moved",
    "turns_set_aside",
    "ledger_away",
    "ledger_behind",
    "ledger_lost",
    "schema",
    "turns_missing",
    "turns_changed",
    "turns_not_counted",
    "other_master_secret",
]


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong now, or was a moment ago.

    - `about`: what is wrong, as the subject of a sentence
    - `engine`: the engine's name, if the condition is about an engine
    - `state`: the rest of that sentence
    - `since_ms`: since when this gateway has seen the condition; never before the gateway's start
    - `cause`: why it is so
    - `remedy`: what an operator can do; empty for keys of one workspace
    - `ended_ms`: when the condition ended; null while it lasts; a condition of one moment is still
      told for some minutes
    """

    kind: ConditionKind
    severity: Severity
    about: str
    engine: str | None
    state: str
    since_ms: int
    cause: str
    remedy: str
    ended_ms: int | None = None

    @property
    def since(self) -> str:
        """The time of day in UTC, with the date if the day is not today."""
        return _time_of(self.since_ms)

    @property
    def sentence(self) -> str:
        """One sentence, such as: engine-0 has not answered since 14:37 UTC: cannot connect."""
        if self.ended_ms is None:
            return f"{self.about} {self.state} since {self.since}: {self.cause}"
        ended = _time_of(self.ended_ms)
        when = f"at {ended}" if ended == self.since else f"from {self.since} to {ended}"
        return f"{self.about} {self.state} {when}, and no more since: {self.cause}"


def _time_of(at_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000, UTC)
    is_today = at.date() == datetime.now(UTC).date()
    return f"{at:%H:%M} UTC" if is_today else f"{at:%Y-%m-%d %H:%M} UTC"
