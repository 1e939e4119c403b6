"""Places in a conversation's newest messages, from renders of these alone.

A *window* is the last question before the first message without a place, the answer before that
message, and all from there on. The template renders it with marks, as it does a whole prompt, and
the places are carried over to the whole prompt's text: both texts are cut at their control tokens
and compared from the end, and a place counts only if its segment's content is the same in both.
So tokens never depend on a window; only boundaries do, and where one can't be carried over the
whole prompt is rendered with marks.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.protocol import Message, Prompt, TextPart, ToolUsePart
from engine.text.template.boundaries import NO_ROOM, Place, PlacedText
from engine.text.template.builder import BuiltMessage
from engine.text.template.conversation import Conversation
from engine.text.template.segments import message_segments
from engine.text.tokens.controls import ControlTexts

_MAX_SHARE = 2
"""A window of more than one of so many messages saves nothing."""
_TAIL = 2
"""What of the whole text is looked at, in lengths of the window's."""


@dataclass(frozen=True, slots=True)
class Window:
    """A conversation of `chosen` messages of the whole, of which the last are wanted: those behind
    the first `num_before`."""

    conversation: Conversation
    chosen: Sequence[int]
    num_before: int


def windows_of(
    whole: Conversation, built: Sequence[BuiltMessage], first_message: int
) -> Iterator[Window]:
    """The messages from `first_message` on, with what must stand before them.

    The second has an earlier turn with a call as well: templates may write the first call of a
    conversation in another way than the others. None that saves nothing.
    `built`: what the first messages of the whole are to the template.
    """
    messages = whole.prompt.messages
    question = _last(messages, first_message, _is_question)
    if question is None:
        return
    answer = _last(messages, first_message, lambda message: message.role == "assistant")
    begin = first_message if answer is None or answer < question else answer
    chosen = [[question, *range(begin, len(messages))]]
    call = _last(messages, begin, _has_call)
    earlier = None if call is None else _last(messages, call, _is_question)
    if earlier is not None:
        chosen.append([*range(earlier, len(messages))])
    for indices in chosen:
        first = indices[1] if indices[1] > question + 1 else indices[0]
        if _MAX_SHARE * len(indices) > len(messages) or len(built) < first:
            return
        prompt = Prompt([messages[i] for i in indices], whole.prompt.tools, whole.prompt.system)
        calls = [call for message in built[:first] for call in message.calls]
        window = Conversation(prompt=prompt, cut=whole.cut, traits=whole.traits, calls=calls)
        yield Window(window, indices, len(indices) - (len(messages) - first_message))


def _last(
    messages: Sequence[Message], end: int, is_wanted: Callable[[Message], bool]
) -> int | None:
    return next((i for i in range(end - 1, -1, -1) if is_wanted(messages[i])), None)


@dataclass(frozen=True, slots=True)
class Carried:
    """Places and cuts of a window in the whole's text."""

    head: Sequence[Place]
    places: Sequence[Place]
    cuts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Newest:
    """A window's rendered text, its segments and its cuts."""

    window: Window
    placed: PlacedText
    window_cuts: Sequence[int]

    def carried(
        self, text: str, controls: ControlTexts, begin: int, *, with_head: bool, with_cuts: bool
    ) -> "Carried | None":
        """What is wanted, in the whole's text; None where something of it has no place there.

        `with_head`: for templates that move the tools or the system prompt along. `with_cuts`:
        those from character `begin` on.
        """
        first = message_segments(self.window.conversation.prompt)
        num_head, num_before = first[0].start, first[self.window.num_before].start
        aligned = _Alignment(self.placed.text, text, controls)
        places = self._carried(self.placed.places[num_before:], text, aligned)
        head = self._carried(self.placed.places[:num_head] if with_head else (), text, aligned)
        cuts = self._cuts(aligned, begin) if with_cuts else []
        if places is None or head is None or cuts is None:
            return None
        return Carried(head, places, cuts)

    def _carried(
        self, places: Sequence[Place], text: str, aligned: "_Alignment"
    ) -> list[Place] | None:
        carried: list[Place] = []
        for place in places:
            if place.end is None or place is NO_ROOM:
                carried.append(place)
                continue
            end = aligned.whole(place.end)
            begin = None if place.begin is None else aligned.whole(place.begin)
            if end is None or (place.begin is not None and begin is None):
                return None
            if begin is not None and self.placed.text[place.begin : place.end] != text[begin:end]:
                return None
            carried.append(Place(end, begin))
        return carried

    def _cuts(self, aligned: "_Alignment", begin: int) -> list[int] | None:
        if aligned.first is None or aligned.first[1] > begin:
            return None
        carried: list[int] = []
        for cut in self.window_cuts:
            if cut < aligned.first[0]:
                continue
            place = aligned.whole(cut)
            if place is None:
                return None
            if place >= begin:
                carried.append(place)
        return carried


def first_carried(
    rendered: Iterable[Newest | None],
    text: str,
    controls: ControlTexts,
    begin: int,
    with_head: bool,
    with_cuts: bool,
) -> Carried | None:
    """What the first window that has it says; None where no window does."""
    for newest in rendered:
        if newest is not None:
            carried = newest.carried(
                text, controls, begin, with_head=with_head, with_cuts=with_cuts
            )
            if carried is not None:
                return carried
    return None


class _Alignment:
    """Two texts that end alike, cut at their control tokens and compared from the end."""

    def __init__(self, window: str, text: str, controls: ControlTexts) -> None:
        self._window = window
        self._text = text
        pairs: list[tuple[int, int]] = []
        first = max(0, len(text) - _TAIL * len(window))
        ours, theirs = controls.matches(window), controls.matches(text, first)
        for mine, other in zip(reversed(ours), reversed(theirs), strict=False):
            if mine.token_id != other.token_id:
                break
            pairs.append((mine.begin, other.begin))
        # Where each stretch begins in the window and in the text; what is before them is unknown.
        self._begins = [mine for mine, _ in reversed(pairs)]
        self._starts = [other for _, other in reversed(pairs)]

    @property
    def first(self) -> tuple[int, int] | None:
        """Where the texts begin to be alike: characters of the window and of the text."""
        return (self._begins[0], self._starts[0]) if self._begins else None

    def whole(self, character: int) -> int | None:
        """Where in the text the window's character is."""
        index = bisect_right(self._begins, character) - 1
        is_last = index + 1 == len(self._begins)
        end = len(self._window) if is_last else self._begins[index + 1]
        stop = len(self._text) if is_last else self._starts[index + 1]
        behind = self._window[character:end]
        if self._text.endswith(behind, self._starts[index] if index >= 0 else 0, stop):
            return stop - len(behind)
        if index < 0:
            return None
        before = self._window[self._begins[index] : character]
        if self._text.startswith(before, self._starts[index], stop):
            return self._starts[index] + len(before)
        return None


def _has_call(message: Message) -> bool:
    return any(isinstance(part, ToolUsePart) for part in message.parts)


def _is_question(message: Message) -> bool:
    return message.role == "user" and all(isinstance(part, TextPart) for part in message.parts)
