"""Where the segments lie in a rendered prompt.

The prompt is rendered with a pair of marks around every segment's content. If the render without
them is the same text, the marks' places are the segments'. Where the marks change the render, as
in a template that compares messages, equal segments get equal marks, and then those marks are left
out that stand where the renders part. Segments without a place are looked for by their words, and
the last few by comparing renders: of the prompt, and of the prompt with something more at that
segment's end; they part where the segment ends.

Cost: at most `MAX_RENDERS` renders a prompt, two for most, and a bounded search.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from engine.errors import InvalidRequest
from engine.protocol import Prompt, ToolUsePart
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.marks import SegmentMarks, Unmarked, take_out
from engine.text.template.messages import Conversation

_MAX_MARKED = 8
_MAX_COMPARISONS = 8
MAX_RENDERS = 1 + _MAX_MARKED + _MAX_COMPARISONS
_NUM_INNER = 4  # pairs of marks for the fields of a tool or a call
_MIN_WORDS = 16  # characters by which a text without marks is known
_SEARCH_LIMIT = 4  # characters looked through for words, in lengths of the text


def segment_texts(prompt: Prompt) -> list[str | None]:
    """Every segment's text; None for those that are JSON objects."""
    texts: list[str | None] = [None] * len(prompt.tools)
    texts += [block.text for block in prompt.system]
    for message in prompt.messages:
        texts += [None if isinstance(p, ToolUsePart) else p.text for p in message.parts]
    return texts


def segment_kinds(prompt: Prompt) -> list[str]:
    """What every segment is: templates treat those of one kind alike."""
    kinds = ["tool"] * len(prompt.tools) + ["system prompt"] * len(prompt.system)
    for message in prompt.messages:
        kinds += [f"{message.role} {type(part).__name__}" for part in message.parts]
    return kinds


def segment_names(prompt: Prompt) -> list[str]:
    """The names of tools and calls; nothing for texts."""
    names = [tool.name for tool in prompt.tools] + [""] * len(prompt.system)
    for message in prompt.messages:
        names += [p.name if isinstance(p, ToolUsePart) else "" for p in message.parts]
    return names


def message_segments(prompt: Prompt) -> list[range]:
    """The segments of each message."""
    begin = len(prompt.tools) + len(prompt.system)
    ends = list(accumulate((len(message.parts) for message in prompt.messages), initial=begin))
    return [range(first, last) for first, last in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Place:
    """Characters of the rendered text. `end` None: the segment has no boundary.

    `begin` is where the segment's content starts, None where only its end is known.
    """

    end: int | None
    begin: int | None = None


NO_ROOM = Place(-1)
"""Of a segment that the template leaves out: it ends where those before it do."""


@dataclass(frozen=True, slots=True)
class PlacedText:
    """A rendered prompt. `places` are where the segments are, in whatever order."""

    text: str
    places: Sequence[Place]


def without_cuts(placed: PlacedText, cut: str) -> tuple[PlacedText, list[int]]:
    """The text without its cuts, and the characters before which they stood."""
    pieces = placed.text.split(cut)
    cuts = list(accumulate(map(len, pieces[:-1])))
    if not cuts:
        return placed, cuts
    before = [place + index for index, place in enumerate(cuts)]

    def moved(character: int | None) -> int | None:
        return None if character is None else character - bisect_left(before, character)

    places = [
        place if place is NO_ROOM else Place(moved(place.end), moved(place.begin))
        for place in placed.places
    ]
    return PlacedText("".join(pieces), places), cuts


def place_segments(
    template: ChatTemplate, conversation: Conversation, *, thinking: bool
) -> PlacedText:
    """Render a conversation, and find every segment in its text by further renders.

    The text still has its cuts. Raises InvalidRequest where the template refuses the prompt or
    where it has too many private-use characters.
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
        self._texts = segment_texts(conversation.prompt)
        self._kinds = segment_kinds(conversation.prompt)
        self._names = segment_names(conversation.prompt)
        self._first_message = len(conversation.prompt.tools) + len(conversation.prompt.system)

    def find(self) -> list[Place]:
        marks, positions = self._mark()
        found = _marked_places(marks, positions)
        unknown: list[int] = []
        for segment in self._with_content():
            if segment in found:
                continue
            # Neither mark came out: the template leaves the text out.
            if segment not in marks or self._texts[segment] is None:
                unknown.append(segment)
        absent = self._find_words(found, [s for s in self._with_content() if s not in found])
        unknown = [s for s in unknown if s not in absent and s not in found]
        self._compare(found, unknown)
        return self._places(found, set(unknown))

    def _with_content(self) -> list[int]:
        """The segments that may have a place of their own."""
        prompt = self._conversation.prompt
        num_moving = len(prompt.tools) if self._conversation.traits.moves_tools else 0
        return [
            segment
            for segment, text in enumerate(self._texts)
            if segment >= num_moving and (text is None or text.strip())
        ]

    def _places(self, found: Mapping[int, Place], unknown: set[int]) -> list[Place]:
        prompt = self._conversation.prompt
        num_moving = len(prompt.tools) if self._conversation.traits.moves_tools else 0
        places: list[Place] = []
        for segment in range(len(self._texts)):
            place = found.get(segment)
            if segment < num_moving or (place is None and segment in unknown):
                place = Place(None)
            places.append(NO_ROOM if place is None else place)
        return places

    def _mark(self) -> tuple[dict[int, SegmentMarks], dict[str, list[int]]]:
        """Marks that leave the render as it is, and where they came out."""
        marks = self._unique_marks()
        shares = False
        for attempt in range(_MAX_MARKED):
            if not marks:
                break
            unmarked = self._render_marked(marks)
            if unmarked is not None and unmarked.text == self._text:
                return marks, unmarked.positions
            if not shares:
                shares = True
                marks = self._shared_marks(marks)
                continue
            marks = self._without(marks, unmarked, whole_kind=unmarked is None or attempt > 2)
        return {}, {}

    def _unique_marks(self) -> dict[int, SegmentMarks]:
        alphabet = self._conversation.alphabet
        segments = [s for s, text in enumerate(self._texts) if text is None or text.strip()]
        num_objects = sum(self._texts[segment] is None for segment in segments)
        # A prompt of very many segments has no characters to spare for their fields.
        spare = alphabet.num_free - 3 * len(segments) - _MAX_COMPARISONS
        num_inner = _NUM_INNER if spare > 2 * _NUM_INNER * num_objects else 0

        def pair(num_inner: int) -> SegmentMarks:
            inner = tuple(pair(0) for _ in range(num_inner))
            return SegmentMarks(alphabet.take(), alphabet.take(), inner)

        return {s: pair(num_inner if self._texts[s] is None else 0) for s in segments}

    def _shared_marks(self, marks: Mapping[int, SegmentMarks]) -> dict[int, SegmentMarks]:
        """Equal texts of one kind get equal marks: a template may compare whole messages."""
        first: dict[tuple[str, str], SegmentMarks] = {}
        shared: dict[int, SegmentMarks] = {}
        for segment, pair in marks.items():
            text = self._texts[segment]
            key = (self._kinds[segment], text or "")
            shared[segment] = pair if text is None else first.setdefault(key, pair)
        return shared

    def _without(
        self, marks: Mapping[int, SegmentMarks], unmarked: Unmarked | None, *, whole_kind: bool
    ) -> dict[int, SegmentMarks]:
        """Less the marks that most likely change the render, or all marks of their kind."""
        nearest = list(marks)[-1]
        if unmarked is not None:
            nearest = _nearest(marks, unmarked, common_length(unmarked.text, self._text))
        if not whole_kind:
            return {s: pair for s, pair in marks.items() if pair is not marks[nearest]}
        kind = self._kinds[nearest]
        return {s: pair for s, pair in marks.items() if self._kinds[s] != kind}

    def _render_marked(self, marks: Mapping[int, SegmentMarks]) -> Unmarked | None:
        """None where the template refuses marked texts."""
        try:
            rendered = self._template.render(
                self._conversation.variables(marks, thinking=self._thinking)
            )
        except InvalidRequest:
            return None
        pairs = [inner for pair in marks.values() for inner in (pair, *pair.inner)]
        return take_out(rendered, frozenset(m for pair in pairs for m in (pair.begin, pair.end)))

    def _find_words(self, found: dict[int, Place], segments: Sequence[int]) -> set[int]:
        """Texts without marks, by their words between the places before and behind them.

        Returns the tools and calls whose name is not there: the template leaves them out.
        """
        missing = set(segments)
        absent: set[int] = set()
        behind = self._begins_behind(found)
        budget = _SEARCH_LIMIT * len(self._text)
        before = 0
        for segment, text in enumerate(self._texts):
            place = found.get(segment)
            is_message = segment >= self._first_message
            if place is not None and is_message:
                before = place.end or before
            words = self._names[segment] if text is None else text.strip()
            room = behind[segment + 1] - before
            if segment not in missing or room > budget:
                continue
            budget -= max(room, 0)
            begin = self._text.find(words, before, behind[segment + 1])
            if text is None and begin < 0:
                absent.add(segment)
            elif text is not None and begin >= 0 and len(words) >= _MIN_WORDS:
                found[segment] = Place(begin + len(words), begin)
                before = begin + len(words) if is_message else before
        return absent

    def _begins_behind(self, found: Mapping[int, Place]) -> list[int]:
        """For every segment where the next message's segment with a known place begins."""
        behind = [len(self._text)] * (len(self._texts) + 1)
        for segment in range(len(self._texts) - 1, -1, -1):
            place = found.get(segment)
            known = None if place is None or segment < self._first_message else place.begin
            behind[segment] = behind[segment + 1] if known is None else known
        return behind

    def _compare(self, found: dict[int, Place], segments: Sequence[int]) -> None:
        """By comparing renders: the newest, whose ends are the ones that the next turn reads."""
        for segment in list(reversed(segments))[:_MAX_COMPARISONS]:
            before = max((p.end or 0 for s, p in found.items() if s < segment), default=0)
            try:
                other = self._template.render(
                    self._conversation.varied(segment).variables({}, thinking=self._thinking)
                )
            except InvalidRequest:
                continue
            end = before if other == self._text else common_length(self._text, other)
            if end > before or other == self._text:
                found[segment] = Place(end)


def _marked_places(
    marks: Mapping[int, SegmentMarks], positions: Mapping[str, list[int]]
) -> dict[int, Place]:
    """A mark that came out more or less often than its segments are has no place."""
    sharing: dict[str, int] = {}
    for pair in marks.values():
        sharing[pair.end] = sharing.get(pair.end, 0) + 1
    seen: dict[str, int] = {}
    found: dict[int, Place] = {}
    for segment, pair in marks.items():
        index = seen.get(pair.end, 0)
        seen[pair.end] = index + 1
        begins, ends = positions.get(pair.begin, []), positions.get(pair.end, [])
        if len(ends) == sharing[pair.end]:
            whole = len(begins) == len(ends)
            found[segment] = Place(ends[index], begins[index] if whole else None)
            continue
        inner = [
            (positions[p.begin][0], positions[p.end][0])
            for p in pair.inner
            if len(positions.get(p.begin, [])) == len(positions.get(p.end, [])) == 1
        ]
        if inner:
            found[segment] = Place(max(e for _, e in inner), min(b for b, _ in inner))
    return found


def common_length(first: str, second: str) -> int:
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
    """The segment with the mark that is nearest to where the renders part."""

    def distance(segment: int) -> int:
        pair = marks[segment]
        found = [
            position
            for mark in (pair.begin, pair.end)
            for position in unmarked.positions.get(mark, [])[:1]
        ]
        return min((abs(p - difference) for p in found), default=len(unmarked.text))

    return min(marks, key=distance)


def in_order(prompt: Prompt, places: Sequence[Place]) -> list[Place]:
    """Make the ends monotone, so that each prefix contains all segments before.

    A template may write the system prompt before the tools: then a tool's prefix contains the
    system prompt, and the system prompt's ends where the tools do. A message's segment that
    is rendered before an earlier segment's end takes that one's boundary away.
    """
    first_message = len(prompt.tools) + len(prompt.system)
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
        if place is NO_ROOM:
            ordered.append(Place(reached))
            continue
        if place.end is None or place.end > limit:
            ordered.append(Place(None, place.begin))
            continue
        reached = max(reached, place.end)
        ordered.append(Place(reached, place.begin))
    return ordered
