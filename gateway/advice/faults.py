"""Finds what breaks prefixes that could have been shared, by digests alone. Pure.

Each turn is compared with the earlier turn that it is most like. The first difference is a fault if
the content behind it is the same again, since its tokens could have been read. A prompt with a new
end has no fault, and neither has a prompt that shares nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gateway.advice.observation import Observation, Segment
from gateway.prompt.sketch import ALIKE, overlap
from gateway.structs.advice import FaultKind
from gateway.structs.misses import Section

_HOUR_MS = 3_600_000
_PERIODS: dict[FaultKind, int] = {"minute": 60_000, "hour": _HOUR_MS, "date": 24 * _HOUR_MS}
_MOSTLY = 0.9
# A text of which only a part changes has about the same length.
_GROWTH_TOKENS = 4
# A fault with fewer tokens, or less than this share of a prompt, is not reported.
_LEAST_TOKENS = 64
_LEAST_SHARE = 0.05
_LEAST_TURNS = 0.1
_FEW = 3


class Loss(NamedTuple):
    """One turn that could not read tokens which an earlier turn had too."""

    turn: str
    # The earlier turn.
    earlier: str
    # The tokens behind the difference that are the same in both turns.
    tokens: int


@dataclass(slots=True)
class Fault:
    """One thing that breaks prefixes again and again, at one block."""

    kind: FaultKind
    section: Section
    # The number of the block in its section.
    index: int
    losses: list[Loss] = field(default_factory=list)
    # Where the block's text changes: "start", "middle" or "end"; "" where that is not known.
    part: str = ""

    @property
    def tokens(self) -> int:
        """Tokens that were the same as in an earlier turn of the last hour, over all losses."""
        return sum(loss.tokens for loss in self.losses)

    @property
    def turns(self) -> int:
        return len(self.losses)

    @property
    def path(self) -> str:
        whole = self.kind in ("tool_order", "tool_set")
        return self.section if whole else f"{self.section}.{self.index}"


def find_faults(turns: Sequence[Observation]) -> list[Fault]:
    """The faults of one stream of turns in order of time, the dearest first."""
    finder = _Finder()
    for turn in turns:
        finder.take(turn)
    return finder.faults(turns)


class _Finder:
    """Looks for faults in turns that it takes one after the other, in order of time."""

    def __init__(self) -> None:
        # The latest turn with each prefix.
        self._chains: dict[bytes, Observation] = {}
        # The latest turn with each segment.
        self._last_with: dict[bytes, Observation] = {}
        # The latest turn with each pair of numbers of tools and of system blocks.
        self._shapes: dict[tuple[int, int], Observation] = {}
        self._faults: dict[tuple[str, Section, int], Fault] = {}
        self._parts: dict[tuple[Section, int], Counter[str]] = defaultdict(Counter)
        self._num_turns = 0
        self._num_near = 0

    def take(self, turn: Observation) -> None:
        segment_digests = turn.segment_digests
        if not segment_digests:
            return
        before = self._shapes.get((turn.num_tools, turn.num_system))
        chains = _chains(turn, len(segment_digests))
        first = next((n for n, chain in enumerate(chains) if chain not in self._chains), None)
        if self._num_turns and first is not None:
            # Whether anything from the first difference on may have been there before.
            is_known = first < turn.head or any(
                content in self._last_with for content in segment_digests[first:]
            )
            if not is_known and first == turn.head and before is not None:
                # The first message may be that of the turn before, with another beginning.
                there = before.pieces_of(first)
                here = turn.pieces_of(first)
                begins = bool(there and here) and there[0] != here[0]
                is_known = begins and overlap(there, here) >= ALIKE
            if is_known:
                self._compare(turn, first)
        self._num_near += before is not None and turn.at_ms - before.at_ms <= _HOUR_MS
        self._num_turns += 1
        self._chains.update(dict.fromkeys(chains, turn))
        for digest in segment_digests:
            self._last_with[digest] = turn
        self._shapes[turn.num_tools, turn.num_system] = turn

    def faults(self, turns: Sequence[Observation]) -> list[Fault]:
        """The faults that came often enough. The kind of a varying text says when it changes."""
        least = 1 if self._num_turns <= _FEW else max(_FEW, _LEAST_TURNS * self._num_near)
        kept = []
        varying = [fault for fault in self._faults.values() if fault.kind == "varying_text"]
        texts = _texts_at({(fault.section, fault.index) for fault in varying}, turns)
        for fault in self._faults.values():
            is_timed = False
            if fault.kind == "varying_text":
                fault.kind = timed(texts[fault.section, fault.index])
                is_timed = fault.kind in ("date", "hour")
                parts = self._parts[fault.section, fault.index]
                fault.part = parts.most_common(1)[0][0] if parts else ""
            enough = min(least, 2) if is_timed else least
            if fault.turns >= enough and fault.tokens:
                kept.append(fault)
        return sorted(kept, key=lambda fault: -fault.tokens)

    def _compare(self, turn: Observation, first: int) -> None:
        earlier = self._earlier(turn, first)
        if earlier is None or earlier.segment_digests[:first] != turn.segment_digests[:first]:
            earlier = self._chains[turn.digests[first - 1]] if first else earlier
        if earlier is None:
            return
        difference = difference_at(earlier, turn, first)
        if difference is None:
            return
        is_of_tools = difference.kind == "varying_text" and difference.section == "tools"
        if is_of_tools and turn.segment_digests[first] in self._last_with:
            # The tool at this place is known from another place.
            difference = replace(difference, kind="tool_set")
        least = max(_LEAST_TOKENS, _LEAST_SHARE * turn.total)
        if difference.tokens < least or turn.at_ms - earlier.at_ms > _HOUR_MS:
            return
        is_of_block = difference.kind in ("varying_text", "key_order")
        if difference.section != "messages":
            is_of_block = difference.kind not in ("tool_order", "tool_set", "moved_text")
        key = (difference.kind, difference.section, difference.index if is_of_block else 0)
        fault = self._faults.get(key)
        if fault is None:
            fault = self._faults[key] = Fault(difference.kind, difference.section, difference.index)
        fault.losses.append(Loss(turn.id, earlier.id, difference.tokens))
        if difference.kind == "varying_text":
            part = ""
            before = earlier.segments
            after = turn.segments
            if first < min(len(before), len(after)):
                pairs = zip(before[first].pieces, after[first].pieces, strict=False)
                is_new = [before != other for before, other in pairs]
                if any(is_new) and not all(is_new):
                    at_end = is_new.index(True) == len(is_new) - 1
                    part = "start" if is_new[0] else "end" if at_end else "middle"
            self._parts[difference.section, difference.index][part] += 1

    def _earlier(self, turn: Observation, first: int) -> Observation | None:
        """The latest turn that has the most tokens of what follows the difference.

        Without such a turn it is the latest turn with as many tools and as many system blocks. None
        if the difference is behind the first message, or if there is no such turn.
        """
        segments = turn.segments
        rest = segments[first + 1 :] if first >= turn.head else segments[first:]
        votes: Counter[str] = Counter()
        newest: dict[str, Observation] = {}
        for segment in rest:
            other = self._last_with.get(segment.digest)
            if other is not None:
                votes[other.id] += segment.tokens
                newest[other.id] = other
        if votes:
            return newest[votes.most_common(1)[0][0]]
        if first > turn.head:
            return None
        return self._shapes.get((turn.num_tools, turn.num_system))


_Places = dict[tuple[Section, int], list[tuple[int, bytes]]]


def _texts_at(places_asked: set[tuple[Section, int]], turns: Sequence[Observation]) -> _Places:
    """For each of these places: the times of the turns, and the digests of what they had there.

    Of the messages only the first block is followed. The other blocks belong to one conversation.
    """
    places: _Places = {place: [] for place in places_asked}
    heads = [place for place in places_asked if place[0] != "messages" or place[1] == 0]
    for turn in turns if heads else ():
        segment_digests = turn.segment_digests
        starts: dict[Section, tuple[int, int]] = {
            "tools": (0, turn.num_tools),
            "system": (turn.num_tools, turn.num_system),
            "messages": (turn.head, 1),
        }
        for section, index in heads:
            start, count = starts[section]
            if index < count and start + index < len(segment_digests):
                places[section, index].append((turn.at_ms, segment_digests[start + index]))
    return places


def timed(texts: Sequence[tuple[int, bytes]]) -> FaultKind:
    """The kind of a varying text, by how long it stays the same. `texts` has the time of each turn
    and the digest of the text in it."""
    values = {text for _, text in texts}
    if not texts:
        return "varying_text"
    if len(values) >= _MOSTLY * len(texts):
        return "nonce"
    for kind, period in _PERIODS.items():
        of_period: dict[int, set[bytes]] = defaultdict(set)
        periods: dict[bytes, set[int]] = defaultdict(set)
        for at_ms, text in texts:
            of_period[at_ms // period].add(text)
            periods[text].add(at_ms // period)
        has_one_text = all(len(digests) == 1 for digests in of_period.values())
        has_one_period = all(len(numbers) == 1 for numbers in periods.values())
        if has_one_text and len(values) > 1 and has_one_period:
            return kind
    return "varying_text"


def _chains(turn: Observation, count: int) -> list[bytes]:
    """The names of the sketched segments' ends, as far as each has one."""
    places = turn.places
    if len(places) >= count and places[count - 1] == count - 1:
        return turn.digests[:count]
    chains = []
    for place, segment in enumerate(places):
        if segment != place or place >= count:
            break
        chains.append(turn.digests[place])
    return chains


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two turns."""

    kind: FaultKind
    section: Section
    # The number of the block in its section.
    index: int
    # The tokens from this block on that are the same in both turns.
    tokens: int


def difference_at(earlier: Observation, turn: Observation, first: int) -> Difference | None:
    """The first difference of two turns, at the segment `first`. None where it is no fault."""
    earlier_digests = {segment.digest for segment in earlier.segments}
    after = turn.segments[first:]
    same = sum(segment.tokens for segment in after if segment.digest in earlier_digests)
    section: Section = "messages"
    index = first - turn.head
    change: _Change | None
    if first < turn.num_tools:
        section = "tools"
        index = first
        change = _tool_change(earlier, turn)
    elif first < turn.head:
        section = "system"
        index = first - turn.num_tools
        change = _system_change(earlier, turn, first, same)
    else:
        change = _message_change(earlier, turn, first)
    return None if change is None else Difference(change.kind, section, index, same + change.tokens)


class _Change(NamedTuple):
    """How a segment has changed."""

    kind: FaultKind
    # The tokens of the changed segment that stayed the same, as far as is known.
    tokens: int = 0


def _tool_change(earlier: Observation, turn: Observation) -> _Change:
    before = earlier.segments[: earlier.num_tools]
    after = turn.segments[: turn.num_tools]
    if Counter(tool.digest for tool in before) == Counter(tool.digest for tool in after):
        return _Change("tool_order")
    if [tool.unordered for tool in before] == [tool.unordered for tool in after]:
        pairs = zip(before, after, strict=True)
        return _Change("key_order", sum(a.tokens for b, a in pairs if a.digest != b.digest))
    if Counter(tool.unordered for tool in before) == Counter(tool.unordered for tool in after):
        return _Change("tool_order")
    return _Change("varying_text" if len(before) == len(after) else "tool_set")


def _system_change(
    earlier: Observation, turn: Observation, first: int, same: int
) -> _Change | None:
    """`same` is the number of tokens from here on that the earlier turn has too."""
    if _moves(earlier, turn, first):
        return _Change("moved_text")
    here = turn.segments[first]
    there = _segment_at(earlier, first)
    if there is None or not (here.pieces and there.pieces):
        # A short block changed as a whole, and the blocks behind it did not.
        is_kept = same >= _LEAST_TOKENS and _has_rest(earlier, turn, first)
        return _Change("varying_text") if is_kept else None
    # Whether the text is the earlier text with more at its end.
    kept = set(here.pieces)
    inner = there.pieces[:-1]
    has_same_start = bool(inner) and here.pieces[0] == inner[0]
    has_new_end = here.pieces[-1] != there.pieces[-1]
    is_kept = sum(piece in kept for piece in inner) >= ALIKE * len(inner)
    if has_same_start and has_new_end and is_kept and here.tokens >= there.tokens + _GROWTH_TOKENS:
        return _Change("growing_text", there.tokens)
    alike = _overlap_of(there, here)
    if alike >= ALIKE:
        return _Change("varying_text", round(alike * here.tokens))
    return _Change("varying_text") if _has_rest(earlier, turn, first) else None


def _message_change(earlier: Observation, turn: Observation, first: int) -> _Change | None:
    before = earlier.segments
    after = turn.segments
    here = after[first]
    there = _segment_at(earlier, first)
    # The first messages of the earlier turn may be left out. Then the next ones have moved up.
    old_places = {segment.digest: place for place, segment in enumerate(before)}
    shift = old_places.get(here.digest, first) - first
    behind = zip(after[first:], before[first + shift :], strict=False)
    is_same = [new.digest == old.digest for new, old in behind]
    if shift > 0 and len(is_same) >= 2 and all(is_same):
        return _Change("sliding_history")
    if there is None:
        return None
    if here.unordered is not None and here.unordered == there.unordered:
        return _Change("key_order", here.tokens)
    if _moves(earlier, turn, first):
        return _Change("moved_text")
    if _has_rest(earlier, turn, first) and len(before) > first + 1:
        return _Change("varying_text")
    alike = _overlap_of(there, here)
    if first == turn.head and alike >= ALIKE and there.pieces[0] != here.pieces[0]:
        return _Change("varying_text", round(alike * here.tokens))
    return None


def _segment_at(turn: Observation, index: int) -> Segment | None:
    return turn.segments[index] if index < len(turn.segments) else None


def _overlap_of(there: Segment, here: Segment) -> float:
    """The share of the pieces of two texts that is the same; 0 where either has none."""
    return overlap(there.pieces, here.pieces) if there.pieces and here.pieces else 0.0


def _has_rest(earlier: Observation, turn: Observation, first: int) -> bool:
    """Whether most of the tokens behind the segment `first` are the same as in the earlier turn, in
    the same order. Behind a tool or a system block only those up to the head's end count."""
    before = earlier.segments[first + 1 :]
    after = turn.segments[first + 1 :]
    if first < turn.head:
        before = before[: earlier.head - first - 1]
        after = after[: turn.head - first - 1]
    same = sum(b.tokens for b, a in zip(before, after, strict=False) if a.digest == b.digest)
    return same >= max(_LEAST_TOKENS, 0.8 * sum(segment.tokens for segment in before))


def _moves(earlier: Observation, turn: Observation, first: int) -> bool:
    """Whether the earlier turn's text at `first` stands at a later place now: texts changed their
    order, or new ones stand before it. Short texts do not count."""
    before = earlier.segments
    after = turn.segments
    if first >= len(before):
        return False
    new_places = {segment.digest: place for place, segment in enumerate(after)}
    new_place = new_places.get(before[first].digest)
    is_long = before[first].tokens >= _LEAST_TOKENS // 4
    return new_place is not None and new_place > first and is_long
