"""Turns as requests of the simulated engines, in units of some tokens.

A prefix of `n` tokens has `round(n / unit)` units, so the sizes of memory are right on average.
What was read is told in exact tokens wherever it ends at a known prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.lookup import Segment, SegmentKind
from engine.protocol import Breakpoint, HeldName, outlives
from gateway.planner.simulated import SimulatedRequest
from gateway.planning.traffic import Turn, total_tokens

BLOCK_TOKENS = 16
"""Of an engine."""
_UNITS_A_TURN, _UNITS = 5, 100_000
EXACT_TOKENS = 2_000_000
"""Of all prompts together: up to so many, a unit is one token."""
_NO_END = Segment("text", None)


@dataclass(slots=True, kw_only=True)
class PlannedRequest(SimulatedRequest):
    """`exact` has the tokens of the prefixes that are known, by their units."""

    exact: dict[int, int]
    marked: list[Breakpoint]
    parts: list[Segment]
    scope_number: int
    is_counted: bool = True
    held_names: list[HeldName] = field(default_factory=list)

    def tokens_of(self, start: int, end: int) -> int:
        return self._tokens_at(end) - self._tokens_at(start)

    def _tokens_at(self, units: int) -> int:
        found = self.exact.get(units)
        return min(units * self.unit_tokens, self.tokens) if found is None else found

    def names(self) -> list[HeldName]:
        return self.held_names

    def segments(self) -> list[Segment]:
        return self.parts

    def breakpoints(self) -> list[Breakpoint]:
        return self.marked


def exact_unit_for(turns: Sequence[Turn]) -> int:
    """One token where the traffic is small enough for that, else as `unit_for` says."""
    return 1 if total_tokens(turns) <= EXACT_TOKENS else unit_for(turns)


def unit_for(turns: Sequence[Turn]) -> int:
    """Tokens of a unit: as few as the number of turns allows."""
    wanted = max(_UNITS_A_TURN * len(turns), _UNITS)
    return max(BLOCK_TOKENS, -(-total_tokens(turns) // wanted))


class Requests:
    """`with_names`: more than one engine asks where a prefix is held."""

    def __init__(self, unit: int, *, with_names: bool) -> None:
        self._unit = unit
        self._with_names = with_names
        self._slots: dict[int, dict[int, list[int]]] = {}
        self.num_units = 0

    def of(self, turn: Turn) -> PlannedRequest:
        units, depths, exact = self._units(turn)
        ends, segments, segment_of = self._segments(turn, depths)
        marked: dict[int, Breakpoint] = {}
        for place, ttl in turn.marks:
            segment = segment_of.get(place, -1)
            if segment >= 0 and (segment not in marked or outlives(ttl, marked[segment].ttl)):
                marked[segment] = Breakpoint(segment, ttl)
        names = []
        if self._with_names:
            names = [HeldName(f"{units[depth - 1]:x}", depth) for depth in ends]
        return PlannedRequest(
            at=turn.at,
            kind="",
            units=units,
            unit_tokens=self._unit,
            tokens=turn.ends[-1] + turn.tail,
            output_tokens=turn.output,
            ends=ends,
            scope=f"workspace-{turn.scope}",
            behind=self._new(max(turn.tail, 1) if self._unit == 1 else 1),
            answer=self._new(turn.output // self._unit + (self._unit == 1)),
            exact=exact,
            marked=list(marked.values()),
            parts=segments,
            scope_number=turn.scope,
            held_names=names,
        )

    def _segments(
        self, turn: Turn, depths: list[int]
    ) -> tuple[list[int], list[Segment], dict[int, int]]:
        """The ends in units, the segments, and the number of the segment at each place.

        Segments without an end stand for positions that are walked between two places. Segments of
        one run are one position.
        """
        ends, segments, segment_of = list[int](), list[Segment](), dict[int, int]()
        kind: SegmentKind = "tool_use" if turn.steps else "text"
        walked = run = 0
        for place in turn.segments:
            depth, step = depths[place], turn.steps[place] if turn.steps else 1
            run += step > 0
            walked += step
            if depth and (not ends or depth > ends[-1]):
                if turn.steps:
                    segments += [_NO_END] * (walked - 1)
                ends.append(depth)
                segments.append(Segment(kind, depth, run))
                walked = 0
            segment_of[place] = len(segments) - 1
        return ends, segments, segment_of

    def _units(self, turn: Turn) -> tuple[list[int], list[int], dict[int, int]]:
        """The prompt's units, the depth of each prefix in them, and its tokens by depth."""
        unit, slots = self._unit, self._slots.setdefault(turn.scope, {})
        units: list[int] = []
        depths: list[int] = []
        exact: dict[int, int] = {}
        last = len(turn.ids) - 1
        for place, (number, end) in enumerate(zip(turn.ids, turn.ends, strict=True)):
            slot = slots.get(number)
            if slot is None:
                count = round(end / unit) - len(units)
                if place == last and not units:
                    count = max(count, 1)
                slot = slots[number] = self._new(max(count, 0))
            units += slot
            depths.append(len(units))
            exact[len(units)] = end
        if not units:
            units, depths[last] = self._new(1), 1
            exact[1] = turn.ends[-1]
        return units, depths, exact

    def _new(self, count: int) -> list[int]:
        first = self.num_units
        self.num_units += max(count, 0)
        return list(range(first, self.num_units))
