"""Finds the places of the segments in a rendered prompt.

The prompt is rendered with a pair of marks around every segment's content. If this render without
its marks equals the plain render, the marks' places are the segments' places. Marks may change the
render, as in a template that compares messages. Then equal segments get equal marks. If that is not
enough, the marks nearest to the first difference are left out.

Segments without a place are searched by their words. The last few of them are found by comparing
renders: the prompt is rendered with something more at the segment's end. The first difference to
the plain render is the segment's end.

A prompt costs at most 17 renders and a bounded search. Most prompts cost two renders.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import AnyStr

from engine.errors import InvalidRequest
from engine.protocol import Message, Prompt, ToolUsePart
from engine.text.template.chat_template import ChatTemplate, SegmentMarks, Unmarked, take_out
from engine.text.template.messages import Conversation

_MAX_MARKED = 8
"""The most renders with marks."""
_MAX_COMPARISONS = 8
"""The most renders for comparison."""
_NUM_INNER = 4
"""The pairs of marks for the fields of a tool or a call."""
_MIN_WORDS = 16
"""The least characters of a text that is found by its words."""
_SEARCH_LIMIT = 4
"""The most characters that are searched for words, as a multiple of the text's length."""


@dataclass(frozen=True, slots=True)
class TemplateSegment:
    """A tool, a block of the system prompt or a part of a message."""

    # Templates treat segments of one kind alike.
    kind: str
    # None for a JSON object.
    text: str | None
    # The name of the tool, or of the called tool.
    name: str = ""
    # The message that the segment is a part of.
    message: Message | None = field(default=None, compare=False)


def segments_of(prompt: Prompt) -> list[TemplateSegment]:
    """A prompt's segments in order: tools, system blocks, the messages' parts."""
    segments = [TemplateSegment("tool", None, tool.name) for tool in prompt.tools]
    segments += [TemplateSegment("system prompt", block.text) for block in prompt.system]
    for message in prompt.messages:
        for part in message.parts:
            kind = f"{message.role} {type(part).__name__}"
            if isinstance(part, ToolUsePart) and isinstance(part.input, str):
                segments.append(TemplateSegment(f"{kind} text", part.input, part.name, message))
            elif isinstance(part, ToolUsePart):
                segments.append(TemplateSegment(kind, None, part.name, message))
            else:
                segments.append(TemplateSegment(kind, part.text, message=message))
    return segments


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a segment among the characters of the rendered text."""

    # The end of the segment; None: the segment has no boundary.
    end: int | None
    # The begin of the segment's content; None: only its end is known.
    begin: int | None = None


@dataclass(frozen=True, slots=True)
class PlacedText:
    """A rendered prompt, and the places of its segments."""

    text: str
    places: Sequence[Place]


def without_cuts(placed: PlacedText, cut: str) -> tuple[PlacedText, list[int]]:
    """The text without its cuts, and the characters of that text before which the cuts stood."""
    pieces = placed.text.split(cut)
    cuts = list(accumulate(map(len, pieces[:-1])))
    if not cuts:
        return placed, cuts
    before = [place + index for index, place in enumerate(cuts)]

    def moved(character: int | None) -> int | None:
        return None if character is None else character - bisect_left(before, character)

    places = [Place(moved(place.end), moved(place.begin)) for place in placed.places]
    return PlacedText("".join(pieces), places), cuts


def place_segments(
    template: ChatTemplate, conversation: Conversation, *, thinking: bool
) -> PlacedText:
    """Render a conversation, and find every segment in its text by further renders.

    The text still has its cuts. Raises InvalidRequest if the template refuses the prompt, or if the
    prompt has too many private-use characters.
    """
    text = template.render(conversation.variables({}, thinking=thinking))
    return PlacedText(text, _Finder(template, conversation, text, thinking).find())


class _Finder:
    def __init__(
        self, template: ChatTemplate, conversation: Conversation, text: str, thinking: bool
    ) -> None:
        self._template = template
        self._conversation = conversation
        self._text = text
        self._thinking = thinking
        self._segments = segments_of(conversation.prompt)
        num_tools = len(conversation.prompt.tools)
        self._first_message = num_tools + len(conversation.prompt.system)
        self._num_moving = num_tools if conversation.traits.moves_tools else 0
        self._with_content = [
            number
            for number, segment in enumerate(self._segments)
            if segment.text is None or segment.text.strip()
        ]

    def find(self) -> list[Place]:
        marks, positions = self._mark()
        places = _marked_places(marks, positions)
        wanted = [s for s in self._with_content if s >= self._num_moving and s not in places]
        absent = self._find_words(places, wanted)
        # If neither mark of a text came out, the template leaves the text out.
        unknown = [
            s
            for s in wanted
            if (s not in marks or self._segments[s].text is None)
            and s not in absent
            and s not in places
        ]
        # Compare renders for the newest segments, because the next turn reads up to their ends.
        for number in unknown[::-1][:_MAX_COMPARISONS]:
            before = max((p.end or 0 for s, p in places.items() if s < number), default=0)
            varied = self._conversation.varied(number)
            try:
                varied_text = self._template.render(varied.variables({}, thinking=self._thinking))
            except InvalidRequest:
                continue
            end = before if varied_text == self._text else common_length(self._text, varied_text)
            if end > before or varied_text == self._text:
                places[number] = Place(end)
        nowhere = {*range(self._num_moving), *(s for s in unknown if s not in places)}
        # Make the ends monotone, so that each prefix contains all segments before its end. A
        # template may write the system prompt before the tools. Then a tool's prefix contains the
        # system prompt, and the system prompt ends where the tools end. If a message's segment is
        # rendered before the end of an earlier segment, the earlier one has no boundary.
        numbers = range(len(self._segments))
        # For each segment the earliest begin of later segments of messages.
        limits: list[int] = []
        limit = max((place.end or 0 for place in places.values()), default=0)
        for number in reversed(numbers):
            limits.append(limit)
            begin = places[number].begin if number in places else None
            if number >= self._first_message and begin is not None:
                limit = min(limit, begin)
        ordered: list[Place] = []
        reached = 0
        for number, limit in zip(numbers, reversed(limits), strict=True):
            place = Place(None) if number in nowhere else places.get(number)
            if place is None:  # the template leaves the segment out
                ordered.append(Place(reached))
            elif place.end is None or place.end > limit:
                ordered.append(Place(None, place.begin))
            else:
                reached = max(reached, place.end)
                ordered.append(Place(reached, place.begin))
        return ordered

    def _mark(self) -> tuple[dict[int, SegmentMarks], dict[str, list[int]]]:
        """Marks that do not change the render, and their positions in it."""
        alphabet = self._conversation.alphabet
        numbers = self._with_content
        num_objects = sum(self._segments[number].text is None for number in numbers)
        # A prompt with very many segments leaves no characters for marks of fields.
        spare = alphabet.num_free - 3 * len(numbers) - _MAX_COMPARISONS
        num_inner = _NUM_INNER if spare > 2 * _NUM_INNER * num_objects else 0

        def new_pair(num_inner: int) -> SegmentMarks:
            inner = tuple(new_pair(0) for _ in range(num_inner))
            return SegmentMarks(alphabet.take(), alphabet.take(), inner)

        marks = {s: new_pair(0 if self._segments[s].text else num_inner) for s in numbers}
        for attempt in range(_MAX_MARKED):
            if not marks:
                break
            unmarked: Unmarked | None = None  # stays None if the template refuses marked texts
            variables = self._conversation.variables(marks, thinking=self._thinking)
            with suppress(InvalidRequest):
                unmarked = take_out(self._template.render(variables), _characters(marks.values()))
            if unmarked is not None and unmarked.text == self._text:
                return marks, unmarked.positions
            if not attempt:
                # Equal texts of one kind get equal marks, because a template may compare messages.
                first: dict[TemplateSegment, SegmentMarks] = {}
                for number, pair in marks.items():
                    segment = self._segments[number]
                    if segment.text is not None:
                        marks[number] = first.setdefault(segment, pair)
                continue
            # Leave out the marks that most likely change the render, or all marks of their kind.
            nearest = list(marks)[-1]
            if unmarked is not None:
                parting = common_length(unmarked.text, self._text)
                nearest = _nearest(parting, marks, unmarked.positions)
            kind = self._segments[nearest].kind
            changing = marks[nearest]
            whole_kind = unmarked is None or attempt > 2
            marks = {
                number: pair
                for number, pair in marks.items()
                if (self._segments[number].kind != kind if whole_kind else pair is not changing)
            }
        return {}, {}

    def _find_words(self, places: dict[int, Place], missing: Sequence[int]) -> set[int]:
        """Find texts without marks by their words, between the places before and behind them.

        Add their places to `places`. Return the tools and calls whose name is not there, because
        the template leaves them out.
        """
        # For each segment the begin of the next message's segment whose place is known.
        behind = [len(self._text)] * (len(self._segments) + 1)
        for number in range(len(self._segments) - 1, -1, -1):
            place = places.get(number)
            known = None if place is None or number < self._first_message else place.begin
            behind[number] = behind[number + 1] if known is None else known
        wanted = set(missing)
        absent = set[int]()
        budget = _SEARCH_LIMIT * len(self._text)
        before = 0
        for number, segment in enumerate(self._segments):
            place = places.get(number)
            is_message = number >= self._first_message
            if place is not None and is_message:
                before = place.end or before
            room = behind[number + 1] - before
            if number not in wanted or room > budget:
                continue
            budget -= max(room, 0)
            words = segment.name if segment.text is None else segment.text.strip()
            begin = self._text.find(words, before, behind[number + 1])
            if segment.text is None and begin < 0:
                absent.add(number)
            elif segment.text is not None and begin >= 0 and len(words) >= _MIN_WORDS:
                places[number] = Place(begin + len(words), begin)
                before = begin + len(words) if is_message else before
        return absent


def _characters(pairs: Iterable[SegmentMarks]) -> frozenset[str]:
    """All marks of these pairs and of their inner pairs."""
    marks: set[str] = set()
    for pair in pairs:
        marks.update((pair.begin, pair.end))
        for part in pair.inner:
            marks.update((part.begin, part.end))
    return frozenset(marks)


def _nearest(
    character: int, marks: Mapping[int, SegmentMarks], positions: Mapping[str, list[int]]
) -> int:
    """The segment with a mark nearest to a character; the first segment if no mark came out."""
    distances: list[tuple[int, int]] = []
    for segment, pair in marks.items():
        for mark in (pair.begin, pair.end):
            if mark in positions:
                distances.append((abs(positions[mark][0] - character), segment))
    return min(distances)[1] if distances else next(iter(marks))


def _marked_places(
    marks: Mapping[int, SegmentMarks], positions: Mapping[str, list[int]]
) -> dict[int, Place]:
    """The places of segments by their marks.

    A mark must come out as often as it has segments. Otherwise the marks of fields give the place,
    if there are any.
    """
    sharing = Counter(pair.end for pair in marks.values())
    seen: Counter[str] = Counter()
    places: dict[int, Place] = {}
    for segment, pair in marks.items():
        index = seen[pair.end]
        seen[pair.end] += 1
        begins = positions.get(pair.begin, [])
        ends = positions.get(pair.end, [])
        if len(ends) == sharing[pair.end]:
            whole = len(begins) == len(ends)
            places[segment] = Place(ends[index], begins[index] if whole else None)
            continue
        inner = [
            (positions[p.begin][0], positions[p.end][0])
            for p in pair.inner
            if len(positions.get(p.begin, [])) == len(positions.get(p.end, [])) == 1
        ]
        if inner:
            places[segment] = Place(max(e for _, e in inner), min(b for b, _ in inner))
    return places


def common_length(first: AnyStr, second: AnyStr, unit: int = 1) -> int:
    """The number of whole units in the longest common prefix. A unit has `unit` items.

    The search is a bisection. It compares each item once or twice, outside of the interpreter.
    """
    low = 0
    high = min(len(first), len(second)) // unit
    while low < high:
        middle = (low + high + 1) // 2
        if first[low * unit : middle * unit] == second[low * unit : middle * unit]:
            low = middle
        else:
            high = middle - 1
    return low
