"""Why breakpoints were not read: a reason for each of them, and the request's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.cache.block import Entry
from engine.cache.digests import PromptDigests
from engine.cache.entries import Entries
from engine.cache.lookup import Mark, Segment
from engine.protocol import Breakpoint, MissReason

_NO_TRACE: tuple[MissReason, ...] = ("grew", "cold", "lookback_exceeded", "no_boundary")
"""Reasons that tell of no entry that stood at the breakpoint itself and is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Explains one look-up at the moment `now`. `has_states`: a prompt can be gone on with from an
    entry's own position alone."""

    entries: Entries
    digests: PromptDigests
    segments: Sequence[Segment]
    breakpoints: Sequence[Breakpoint]
    now: float
    has_states: bool

    def by_segment(self, marks: Sequence[Mark], hit: Entry | None) -> dict[int, MissReason]:
        """Why what stands up to each breakpoint was not read in full. Breakpoints that were read
        are not in it. `marks` are those that may have an entry."""
        read = 0 if hit is None else hit.tokens
        able = {mark.segment for mark in marks}
        nearest = None if hit is not None else self._nearest(marks)
        reasons: dict[int, MissReason] = {}
        for point in self.breakpoints:
            end = self.segments[point.segment].end
            if end is None:
                reasons[point.segment] = "no_boundary"
            elif end > read:
                is_able = point.segment in able
                reasons[point.segment] = (
                    self._of_mark(point.segment, end, hit, nearest) if is_able else "below_minimum"
                )
        return reasons

    def of_request(
        self, marks: Sequence[Mark], hit: Entry | None, reasons: Mapping[int, MissReason]
    ) -> MissReason | None:
        """Why the last breakpoint was not read in full, by the `reasons` of all. None if it was, or
        if the prefix merely grew."""
        if not self.breakpoints:
            return "no_breakpoint"
        if not marks:
            ends = [self.segments[point.segment].end for point in self.breakpoints]
            return "below_minimum" if any(end is not None for end in ends) else "no_boundary"
        last = reasons.get(marks[-1].segment)
        if last is None or last == "no_boundary":
            return last
        for mark in reversed(marks):
            reason = reasons.get(mark.segment)
            if reason is not None and reason not in _NO_TRACE:
                return reason
        return last if hit is None else None

    def _of_mark(
        self, segment: int, end: int, hit: Entry | None, nearest: int | None
    ) -> MissReason:
        if self.has_states and self.entries.find(self.digests, end, self.now) is not None:
            return "no_boundary"  # its state has taken in the prompt's last token
        known = self.entries.why_missing(self.digests.at(end), self.now)
        if known is not None:
            return known
        if hit is not None:
            return "grew"
        is_behind = nearest is not None and nearest <= segment
        return "lookback_exceeded" if is_behind else "cold"

    def _nearest(self, marks: Sequence[Mark]) -> int | None:
        """The first segment up to the last mark at whose end a live entry stands."""
        last = marks[-1].segment if marks else -1
        for number, segment in enumerate(self.segments[: last + 1]):
            if segment.end and self.entries.find(self.digests, segment.end, self.now) is not None:
                return number
        return None
