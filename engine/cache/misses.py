"""Why breakpoints were not read: a reason for each of them, and the request's own."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.cache.digests import PromptDigests
from engine.cache.entries import Entries
from engine.cache.lookup import Mark, Segment, window
from engine.protocol import Breakpoint, MissReason

_NO_TRACE: tuple[MissReason, ...] = ("grew", "cold", "lookback_exceeded", "no_boundary")
"""Reasons that are given where no entry stood at the breakpoint itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """Explains one look-up."""

    entries: Entries
    digests: PromptDigests
    segments: Sequence[Segment]
    breakpoints: Sequence[Breakpoint]
    # The moment of the look-up.
    now: float
    # Whether the model has a recurrent state. It can continue only where a state was kept.
    has_states: bool
    # The segment that the request's look-up goes back to. None: it goes back over the window.
    lookback_to: int | None

    def by_segment(self, marks: Sequence[Mark], read: int) -> dict[int, MissReason]:
        """The reasons why breakpoints were not read in full, by their segments.

        An entry of `read` tokens was read. A breakpoint that was read in full has no reason.
        `marks` are the eligible breakpoints.
        """
        eligible_segments = {mark.segment for mark in marks}
        live = self._live(marks, read)
        reasons: dict[int, MissReason] = {}
        for point in self.breakpoints:
            end = self.segments[point.segment].end
            if end is None:
                reasons[point.segment] = "no_boundary"
            elif end <= read:
                continue
            elif point.segment not in eligible_segments:
                reasons[point.segment] = "below_minimum"
            else:
                reasons[point.segment] = self._of_mark(point.segment, end, read, live)
        return reasons

    def of_request(
        self, marks: Sequence[Mark], read: int, reasons: Mapping[int, MissReason]
    ) -> MissReason | None:
        """Why the request read less than it marked, by the `reasons` of its breakpoints.

        None if the last eligible breakpoint was read in full. Reasons outside of _NO_TRACE decide,
        the last breakpoint's before the others. Without such a reason the last breakpoint's own
        reason decides if nothing was read. If something was read, the prefix merely grew, and the
        result is None.
        """
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
        return None if read else last

    def _of_mark(self, segment: int, end: int, read: int, live: Sequence[int]) -> MissReason:
        if self.has_states and self._is_live(end, read):
            return "no_boundary"  # its state has taken in the prompt's last token
        known = self.entries.why_missing(self.digests.at(end), self.now)
        if known is not None:
            return known
        nearest = bisect_right(live, segment) - 1
        if nearest < 0:
            return "grew" if read else "cold"
        is_reached = live[nearest] in self._reach(segment)
        return "best_effort_evicted" if is_reached else "lookback_exceeded"

    def _reach(self, segment: int) -> Collection[int]:
        """The segments whose entries a breakpoint at `segment` may read."""
        if self.lookback_to is not None:
            return range(self.lookback_to, segment + 1)
        return set(window(self.segments, segment))

    def _live(self, marks: Sequence[Mark], read: int) -> list[int]:
        """The segments behind what was read at whose ends live entries stand, up to the last mark.

        A mark may reach such an entry and still not read it. In another program's memory the
        content may be gone, and only that program knows.
        """
        last = marks[-1].segment if marks else -1
        numbers = range(last + 1)
        return [number for number in numbers if self._is_live(self.segments[number].end, read)]

    def _is_live(self, end: int | None, read: int) -> bool:
        """Whether a readable entry ends here, behind what was read."""
        if end is None or end <= read:
            return False
        return self.entries.find(self.digests, end, self.now) is not None
