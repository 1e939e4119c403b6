"""Where the segments lie in a rendered prompt.

The prompt is rendered with a pair of marks around every segment's content. If the render without
them is the same text, the marks' places are the segments'. A segment whose marks the template
drops, repeats or stumbles over is found by comparing renders: of the prompt, and of the prompt
with something more at that segment's end; they part where the segment ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.text.template.chat_template import ChatTemplate
from engine.text.template.conversation import Conversation, segment_texts
from engine.text.template.marks import SegmentMarks, Unmarked, take_out

# Every comparison renders the whole prompt. Beyond these the remaining segments have no end.
_MAX_RETRIES = 4
_MAX_COMPARISONS = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Characters of the rendered text. `end` None: the segment has no boundary.

    `begin` is where the segment's content starts, None where only its end is known.
    """

    end: int | None
    begin: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedText:
    """`text` still has its cuts. `places` are monotone: no segment ends before an earlier one."""

    text: str
    places: list[Place]


def place_segments(
    template: ChatTemplate, conversation: Conversation, *, thinking: bool
) -> PlacedText:
    """Render and find every segment. Raises InvalidRequest where the template refuses."""
    text = template.render(conversation.variables({}, thinking=thinking))
    finder = _Finder(template, conversation, text, thinking)
    return PlacedText(text, _in_order(conversation, finder.find()))


class _Finder:
    def __init__(
        self, template: ChatTemplate, conversation: Conversation, text: str, thinking: bool
    ) -> None:
        self._template = template
        self._conversation = conversation
        self._text = text
        self._thinking = thinking
        self._num_comparisons = 0

    def find(self) -> list[Place]:
        texts = segment_texts(self._conversation.prompt)
        alphabet = self._conversation.alphabet
        marks = {
            segment: SegmentMarks(alphabet.take(), alphabet.take())
            for segment, text in enumerate(texts)
            if text is None or text.strip()
        }
        unmarked = self._render_marked(marks)
        for _ in range(_MAX_RETRIES):
            if unmarked is None or unmarked.text == self._text:
                break
            difference = _common_length(unmarked.text, self._text)
            del marks[_nearest(marks, unmarked, difference)]
            unmarked = self._render_marked(marks)
        positions: Mapping[str, int] = {}
        if unmarked is not None and unmarked.text == self._text:
            positions = unmarked.positions
        places: list[Place] = []
        moves_tools = self._conversation.traits.moves_tools
        num_moving = len(self._conversation.prompt.tools) if moves_tools else 0
        for segment, text in enumerate(texts):
            if segment < num_moving:
                places.append(Place(None))
            elif text is not None and not text.strip():
                places.append(_last_place(places))
            else:
                found = _marked_place(marks.get(segment), positions)
                places.append(found or self._compare(segment, _last_place(places)))
        return places

    def _render_marked(self, marks: Mapping[int, SegmentMarks]) -> Unmarked | None:
        if not marks:
            return None
        rendered = self._template.render(
            self._conversation.variables(marks, thinking=self._thinking)
        )
        all_marks = frozenset(mark for pair in marks.values() for mark in (pair.begin, pair.end))
        return take_out(rendered, all_marks)

    def _compare(self, segment: int, previous: Place) -> Place:
        """The end by comparing renders; a segment that is not rendered ends where the last did."""
        if self._num_comparisons >= _MAX_COMPARISONS:
            return Place(None)
        self._num_comparisons += 1
        other = self._template.render(
            self._conversation.varied(segment).variables({}, thinking=self._thinking)
        )
        if other == self._text:
            return previous
        end = _common_length(self._text, other)
        return Place(end) if end > (previous.end or 0) else Place(None)


def _marked_place(pair: SegmentMarks | None, positions: Mapping[str, int]) -> Place | None:
    if pair is None or pair.begin not in positions or pair.end not in positions:
        return None
    return Place(positions[pair.end], positions[pair.begin])


def _last_place(places: Sequence[Place]) -> Place:
    """Where a segment lies that takes no room: right after those before it."""
    end = max((place.end or 0 for place in places), default=0)
    return Place(end)


def _common_length(first: str, second: str) -> int:
    """The length of the longest common prefix, by bisection: comparing slices is fast."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _nearest(marks: Mapping[int, SegmentMarks], unmarked: Unmarked, difference: int) -> int:
    """The segment whose marks most likely changed the render: the last to begin before it."""

    def distance(segment: int) -> int:
        pair = marks[segment]
        found = [unmarked.positions.get(mark) for mark in (pair.begin, pair.end)]
        return min(
            (abs(p - difference) for p in found if p is not None), default=len(unmarked.text)
        )

    return min(marks, key=distance)


def _in_order(conversation: Conversation, places: Sequence[Place]) -> list[Place]:
    """Make the ends monotone, so that each prefix contains all segments before.

    A template may write the system prompt before the tools: then a tool's prefix contains the
    system prompt, and the system prompt's ends where the tools do. A message's segment that
    is rendered before an earlier segment's end takes that one's boundary away.
    """
    first_message = len(conversation.prompt.tools) + len(conversation.prompt.system)
    # For each segment the earliest begin of the messages' segments behind it.
    limits: list[int] = []
    limit = max((place.end or 0 for place in places), default=0)
    for segment in range(len(places) - 1, -1, -1):
        limits.append(limit)
        begin = places[segment].begin
        if segment >= first_message and begin is not None:
            limit = min(limit, begin)
    ordered: list[Place] = []
    reached = 0
    for place, limit in zip(places, reversed(limits), strict=True):
        if place.end is None or place.end > limit:
            ordered.append(Place(None, place.begin))
            continue
        reached = max(reached, place.end)
        ordered.append(Place(reached, place.begin))
    return ordered
