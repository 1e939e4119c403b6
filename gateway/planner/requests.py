"""Turns as requests to the simulated engines. Their prompts are counted in units of several tokens.

A prefix of `n` tokens has `round(n / unit)` units, so the sizes of memory are right on average. A
read that ends at a prefix of the turn is counted in exact tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.cache.lookup import Segment
from engine.protocol import Breakpoint, HeldName, SegmentKind, outlives
from gateway.base.rounding import ceil_div
from gateway.planning.traffic import Turn, total_tokens
from gateway.prompt.names import step_at

BLOCK_TOKENS = 16
"""The tokens of an engine's block."""
CHARACTERS_PER_TOKEN = 4
TAILS = 2**30
"""The first id of units that stand for no tokens. Such a unit is the last one of one prompt."""
ANSWERS = 2**31
"""The first id of units that engines write."""
_UNITS_A_TURN = 5
_UNITS = 100_000
EXACT_TOKENS = 2_000_000
"""The most tokens of all prompts with which a unit may be one token."""
EXACT_OUTPUT = 200_000
"""The most tokens of all answers with which a unit may be one token."""
_NO_END = Segment("text", None)


@dataclass(slots=True, kw_only=True, eq=False)
class PlannedRequest:
    """One turn, as a simulated engine gets it."""

    # When it is sent, in seconds.
    at: float
    scope: str
    # The tokens of a unit.
    unit: int
    # Ids of consecutive pieces of the prompt. Equal ids have equal content and history.
    units: list[int]
    # How many of the last units are in no other prompt.
    num_tail: int
    # The tokens of the prompt.
    tokens: int
    output_tokens: int
    # The tokens of the turn's prefixes, by their number of units.
    exact: dict[int, int]
    # The segments, with their ends in units.
    segments: list[Segment]
    breakpoints: list[Breakpoint]
    # The names, with their depths in units.
    names: list[HeldName]
    # Whether the figures count it. Otherwise it only fills the memory.
    is_counted: bool = True

    @property
    def shared_units(self) -> Sequence[int]:
        """The units that other prompts may have too."""
        return self.units[: len(self.units) - self.num_tail]

    def tokens_at(self, num_units: int) -> int:
        """The tokens of the first `num_units` units."""
        tokens = self.exact.get(num_units)
        return min(num_units * self.unit, self.tokens) if tokens is None else tokens


def unit_for(turns: Sequence[Turn], *, may_be_exact: bool = False) -> int:
    """The tokens of a unit. The more turns there are, the smaller it may be. With `may_be_exact`
    the unit of small traffic is one token."""
    prompts = total_tokens(turns)
    output = sum(turn.output for turn in turns)
    if may_be_exact and prompts <= EXACT_TOKENS and output <= EXACT_OUTPUT:
        return 1
    num_units = max(_UNITS_A_TURN * len(turns), _UNITS)
    return max(BLOCK_TOKENS, ceil_div(max(prompts, output), num_units))


class Requests:
    """Turns as requests.

    `with_names`: requests name their prefixes. A gateway before several engines needs the names.
    `with_tails`: a prompt has at least one unit behind its prefixes, so that an engine can read all
    of them. If the turn has no token there, the unit takes no time.
    """

    def __init__(self, unit: int, *, with_names: bool, with_tails: bool = True) -> None:
        self._unit = unit
        self._with_names = with_names
        self._with_tails = with_tails
        self._slots: dict[int, dict[int, list[int]]] = {}
        self._num_units = 0
        self._num_tails = 0

    def of(self, turn: Turn) -> PlannedRequest:
        units, depths, exact = self._units(turn)
        segments, segment_of = _segments(turn, depths)
        marked: dict[int, Breakpoint] = {}
        for place, ttl in turn.marks:
            segment = segment_of.get(place, -1)
            if segment >= 0 and (segment not in marked or outlives(ttl, marked[segment].ttl)):
                marked[segment] = Breakpoint(segment, ttl, hold=place not in turn.unheld)
        if turn.tail and self._unit == 1:
            tail = self._new(turn.tail)
        else:
            tail = [TAILS + self._num_tails] if self._with_tails else []
            self._num_tails += len(tail)
        return PlannedRequest(
            at=turn.at,
            scope=f"workspace-{turn.scope}",
            unit=self._unit,
            units=[*units, *tail],
            num_tail=len(tail),
            tokens=turn.ends[-1] + turn.tail,
            output_tokens=turn.output,
            exact=exact,
            segments=segments,
            breakpoints=list(marked.values()),
            names=self._names(units, segments, exact) if self._with_names else [],
        )

    def _names(
        self, units: Sequence[int], segments: Sequence[Segment], exact: dict[int, int]
    ) -> list[HeldName]:
        """Names at the ends of segments, and inside texts where `gateway.prompt.names` has them."""
        depths = {segment.end for segment in segments if segment.end}
        step = self._unit * CHARACTERS_PER_TOKEN
        depth = max(step_at(0) // step, 1)
        while depth < len(units):
            if depth in exact:
                depths.add(depth)
            depth += max(step_at(depth * step) // step, 1)
        return [HeldName(f"{units[depth - 1]:x}", depth) for depth in sorted(depths)]

    def _units(self, turn: Turn) -> tuple[list[int], list[int], dict[int, int]]:
        """The prompt's units, the depth of each prefix in them, and its tokens by depth."""
        unit = self._unit
        slots = self._slots.setdefault(turn.scope, {})
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
            units = self._new(1)
            depths[last] = 1
            exact[1] = turn.ends[-1]
        return units, depths, exact

    def _new(self, count: int) -> list[int]:
        first = self._num_units
        self._num_units += count
        return list(range(first, self._num_units))


def _segments(turn: Turn, depths: Sequence[int]) -> tuple[list[Segment], dict[int, int]]:
    """The segments, and the number of the segment at each place.

    A segment without an end stands for a position between two places. All segments of one run are
    one position.
    """
    segments = list[Segment]()
    segment_of = dict[int, int]()
    kind: SegmentKind = "tool_use" if turn.steps else "text"
    walked = 0
    run = 0
    end = 0
    for place in turn.segments:
        depth = depths[place]
        step = turn.steps[place] if turn.steps else 1
        run += step > 0
        walked += step
        if depth > end:
            if turn.steps:
                segments += [_NO_END] * (walked - 1)
            segments.append(Segment(kind, depth, run))
            walked = 0
            end = depth
        segment_of[place] = len(segments) - 1
    return segments, segment_of


class Distances:
    """How far back each token was used last. A memory that reaches back further gives the token."""

    def __init__(self) -> None:
        # The tokens that were used last `d` distinct units ago, by `d`.
        self.tokens: dict[int, int] = {}
        # The tokens of all prompts.
        self.prompt = 0
        # The number of different units.
        self.num_distinct = 0

    @property
    def read(self) -> int:
        return sum(self.tokens.values())

    def curve(self, sizes: Sequence[int]) -> list[float]:
        """For each size, in units: the share of tokens that a memory of this size gives."""
        pairs = sorted(self.tokens.items())
        shares = {}
        at = 0
        total = 0
        for size in sorted(sizes):
            while at < len(pairs) and pairs[at][0] < size:
                total += pairs[at][1]
                at += 1
            shares[size] = total / max(self.prompt, 1)
        return [shares[size] for size in sizes]

    def size_for(self, share: float) -> int:
        """The fewest units that give this share of what unlimited memory gives."""
        least = share * self.read
        total = 0
        for distance, tokens in sorted(self.tokens.items()):
            total += tokens
            if total >= least:
                return distance + 1
        return 1


def distances(requests: Iterable[PlannedRequest], num_uses: int) -> Distances:
    """The distances of all requests. Their prompts have at most `num_uses` units together.

    They are Mattson's stack distances: a unit that was used last `d` distinct units ago is in an
    LRU memory of more than `d` units. Olken's tree counts the distinct units in O(log n) a use.
    """
    distances = Distances()
    tree = [0] * (num_uses + 2)
    used_at = dict[int, int]()
    now = 0
    size = len(tree)
    for request in requests:
        distances.prompt += request.tokens
        deepest = 0
        before = 0
        units = request.shared_units
        for place, unit in enumerate(units):
            at = used_at.get(unit)
            if at is None:
                break
            distance = len(used_at)
            while at:
                distance -= tree[at]
                at &= at - 1
            deepest = max(deepest, distance)
            tokens = request.tokens_at(place + 1)
            distances.tokens[deepest] = distances.tokens.get(deepest, 0) + tokens - before
            before = tokens
        # The deepest unit counts as used first, so it is forgotten first.
        for unit in reversed(units):
            at = used_at.get(unit)
            if at is not None:
                _add(tree, size, at, -1)
            now += 1
            used_at[unit] = now
            _add(tree, size, now, 1)
    distances.num_distinct = len(used_at)
    return distances


def _add(tree: list[int], size: int, at: int, change: int) -> None:
    """A Fenwick tree: one mark for each unit, at its last use."""
    while at < size:
        tree[at] += change
        at += at & -at
