"""What the first difference between two turns is, told by digests alone. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.admin.structs.advice import FaultKind
from gateway.advice.observation import Observation, Segment
from gateway.advice.placements import Section

ALIKE = 0.5
"""Texts with this share of their pieces in common are versions of one text."""
# A text of which only a part changes has about the same length.
_GROWTH_TOKENS = 4
LEAST_TOKENS = 64
"""Fewer are not worth a word."""


@dataclass(frozen=True, slots=True)
class Difference:
    kind: FaultKind
    section: Section
    index: int
    tokens: int


def difference(earlier: Observation, turn: Observation, first: int) -> Difference | None:
    if first < turn.num_tools:
        return _in_tools(earlier, turn, first)
    if first < turn.head:
        return _in_system(earlier, turn, first)
    return _in_messages(earlier, turn, first)


def _in_tools(earlier: Observation, turn: Observation, first: int) -> Difference | None:
    before, after = earlier.segments[: earlier.num_tools], turn.segments[: turn.num_tools]
    tokens = _same_tokens(earlier, turn, first)
    names = Counter(tool.own for tool in before), Counter(tool.own for tool in after)
    if names[0] == names[1]:
        return Difference("tool_order", "tools", first, tokens)
    if [tool.unordered for tool in before] == [tool.unordered for tool in after]:
        changed = sum(a.tokens for b, a in zip(before, after, strict=True) if a.own != b.own)
        return Difference("key_order", "tools", first, tokens + changed)
    if Counter(tool.unordered for tool in before) == Counter(tool.unordered for tool in after):
        return Difference("tool_order", "tools", first, tokens)
    if len(before) != len(after):
        return Difference("tool_set", "tools", first, tokens)
    return Difference("varying_text", "tools", first, tokens)


def _in_system(earlier: Observation, turn: Observation, first: int) -> Difference | None:
    index = first - turn.num_tools
    tokens = _same_tokens(earlier, turn, first)
    if _moves(earlier, turn, first):
        return Difference("moved_text", "system", index, tokens)
    here = turn.segments[first]
    there = earlier.segments[first] if first < len(earlier.segments) else None
    if there is None or not (here.pieces and there.pieces):
        # A short block changed as a whole, and what stands behind it did not.
        is_kept = tokens >= LEAST_TOKENS and _has_rest(earlier, turn, first)
        return Difference("varying_text", "system", index, tokens) if is_kept else None
    alike = _alike(there, here)
    if _grows(there, here):
        return Difference("growing_text", "system", index, tokens + there.tokens)
    if alike >= ALIKE:
        return Difference("varying_text", "system", index, tokens + round(alike * here.tokens))
    if _has_rest(earlier, turn, first):
        return Difference("varying_text", "system", index, tokens)
    return None


def _in_messages(earlier: Observation, turn: Observation, first: int) -> Difference | None:
    index = first - turn.head
    before, after = earlier.segments, turn.segments
    tokens = _same_tokens(earlier, turn, first)
    if _slides(earlier, turn, first):
        return Difference("sliding_history", "messages", index, tokens)
    here, there = after[first], before[first] if first < len(before) else None
    if there is None:
        return None
    if here.unordered is not None and here.unordered == there.unordered:
        return Difference("key_order", "messages", index, tokens + here.tokens)
    if _moves(earlier, turn, first):
        return Difference("moved_text", "messages", index, tokens)
    if _has_rest(earlier, turn, first) and len(before) > first + 1:
        return Difference("varying_text", "messages", index, tokens)
    if index == 0 and there.pieces and here.pieces and there.pieces[0] != here.pieces[0]:
        alike = _alike(there, here)
        if alike >= ALIKE:
            same = tokens + round(alike * here.tokens)
            return Difference("varying_text", "messages", index, same)
    return None


def _same_tokens(earlier: Observation, turn: Observation, first: int) -> int:
    """The tokens from `first` on whose segments both turns have."""
    known = {segment.own for segment in earlier.segments}
    return sum(segment.tokens for segment in turn.segments[first:] if segment.own in known)


def _has_rest(earlier: Observation, turn: Observation, first: int) -> bool:
    """Whether what stood behind the place in the earlier turn stands there again, but for its last
    segment: most of its tokens, in the same order."""
    before = earlier.segments[first + 1 :]
    after = turn.segments[first + 1 :]
    if first < turn.head:
        before = before[: earlier.head - first - 1]
        after = after[: turn.head - first - 1]
    same = sum(b.tokens for b, a in zip(before, after, strict=False) if a.own == b.own)
    return same >= max(LEAST_TOKENS, 0.8 * sum(segment.tokens for segment in before))


def _moves(earlier: Observation, turn: Observation, first: int) -> bool:
    """Whether a text stands at another place than before, among texts that are the same."""
    before, after = earlier.segments, turn.segments
    if first >= len(before):
        return False
    places = {segment.own: n for n, segment in enumerate(after)}
    moved = places.get(before[first].own)
    if moved is None or moved <= first or before[first].tokens < LEAST_TOKENS // 4:
        return False
    were = {segment.own: n for n, segment in enumerate(before)}
    now_here = were.get(after[first].own)
    # Either two texts changed their order, or a text moved on as the conversation grew.
    return now_here is not None or first == len(before) - 1 or after[first].own not in were


def _slides(earlier: Observation, turn: Observation, first: int) -> bool:
    """Whether the earlier turn's first messages were left out and the next ones moved up."""
    were = {segment.own: n for n, segment in enumerate(earlier.segments)}
    shift = were.get(turn.segments[first].own, first) - first
    if shift <= 0:
        return False
    behind = earlier.segments[first + shift :]
    same = [a.own == b.own for a, b in zip(turn.segments[first:], behind, strict=False)]
    return len(same) >= 2 and all(same[: len(behind)])


def _alike(there: Segment, here: Segment) -> float:
    """The part of the pieces that both texts have."""
    return overlap(there.pieces, here.pieces)


def overlap(there: Sequence[bytes], here: Sequence[bytes]) -> float:
    return (Counter(there) & Counter(here)).total() / max(len(there), len(here))


def _grows(there: Segment, here: Segment) -> bool:
    """Whether the text is the earlier one with more behind it."""
    if here.tokens < there.tokens + _GROWTH_TOKENS:
        return False
    kept = set(here.pieces)
    inner = there.pieces[:-1]
    is_begun = bool(inner) and here.pieces[0] == inner[0]
    same = sum(piece in kept for piece in inner)
    return is_begun and here.pieces[-1] != there.pieces[-1] and same >= ALIKE * len(inner)


def part_of(before: Sequence[Segment], after: Sequence[Segment], first: int) -> str:
    """Where in the block the text differs."""
    if first >= min(len(before), len(after)):
        return ""
    pieces = list(_paired(before[first].pieces, after[first].pieces))
    changed = [n for n, is_same in enumerate(pieces) if not is_same]
    if not changed or len(changed) == len(pieces):
        return ""
    if changed[0] == 0:
        return "start"
    return "end" if changed == [len(pieces) - 1] else "middle"


def _paired(there: Sequence[bytes], here: Sequence[bytes]) -> Iterator[bool]:
    yield from (one == other for one, other in zip(there, here, strict=False))
