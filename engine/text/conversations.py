"""Conversations to tokens: the template's own text in one call of the tokenizer, with the segments'
ends.

The part that a conversation shares with an earlier one is not built, marked or tokenized again.
The whole is rendered once, without marks, and compared with the earlier text. Places of new
segments come from renders of the newest messages (`template/window.py`). If any of that fails, the
whole prompt is rendered with marks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import zip_longest

from engine.errors import InvalidRequest
from engine.protocol import Prompt
from engine.text.days import DatedBeginning, KnownDays, beginning_of
from engine.text.rendered import RenderedPrompt, SegmentSpan
from engine.text.seen import PromptKey, Seen, SeenPrompts, key_of
from engine.text.template.boundaries import (
    Place,
    PlacedText,
    common_length,
    in_order,
    place_segments,
)
from engine.text.template.builder import BuiltMessage, KnownCall, is_folded
from engine.text.template.chat_template import ChatTemplate, TemplateFails
from engine.text.template.conversation import (
    Conversation,
    completed_by,
    continued_conversation,
    head_strings,
    message_strings,
    new_conversation,
)
from engine.text.template.segments import message_segments
from engine.text.template.tools import MAX_COMPLETION, with_complete_tools
from engine.text.template.traits import TemplateTraits
from engine.text.template.window import Newest, Window, first_carried, windows_of
from engine.text.tokens.pieces import EncodedText, PieceTokenizer
from engine.text.tokens.spans import segment_spans


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A rendered conversation, whose text has no cuts.

    Its first `num_begun` characters with their cuts, and the places of its first `num_placed`
    segments, are those of an earlier prompt.
    """

    conversation: Conversation
    completion: int
    completed: Sequence[frozenset[str]]
    text: str
    plain_cuts: Sequence[int]
    cuts: Sequence[int]
    found: Sequence[Place]
    places: Sequence[Place]
    num_begun: int = 0
    num_placed: int = 0


class ConversationRenderer:
    """Renders and tokenizes conversations for one template and tokenizer."""

    def __init__(
        self, template: ChatTemplate, pieces: PieceTokenizer, traits: TemplateTraits
    ) -> None:
        self._template = template
        self._pieces = pieces
        self._controls = pieces.controls
        self._traits = traits
        self._seen = SeenPrompts()

    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str = "", days: KnownDays | None = None
    ) -> RenderedPrompt:
        """Tokens and segments. Raises InvalidRequest where the template refuses the prompt.

        A prompt that ends with an assistant's message is cut off behind it, to be continued.
        `scope` separates tenants in the memory of what was rendered and tokenized before.
        With `days` a template that writes the date writes the beginning of the prompt's own day,
        without them the time of the render.
        """
        template = self._template
        if not template.writes_date:
            return self._render_on("", prompt, thinking=thinking, scope=scope)
        dated: DatedBeginning | None = None
        moment = template.now()
        if days is not None:
            beginning = beginning_of(prompt, scope)
            dated = DatedBeginning(beginning, days.day_of(beginning))
            moment = datetime.fromisoformat(dated.day)
        with template.at(moment):
            day = moment.date().isoformat()
            rendered = self._render_on(day, prompt, thinking=thinking, scope=scope)
        return replace(rendered, dated=dated)

    def _render_on(self, day: str, prompt: Prompt, *, thinking: bool, scope: str) -> RenderedPrompt:
        """`day` is empty where the template writes none."""
        key = key_of(prompt, thinking=thinking, scope=scope, day=day)
        found = self._seen.find(key)
        seen: Seen | None = None
        placed: _Placed | None = None
        if found is not None:
            seen, num_messages = found
            placed = self._continue(prompt, seen, num_messages, thinking=thinking)
        if placed is None:
            seen, placed = None, self._place_whole(prompt, thinking=thinking)
        return self._encode(prompt, placed, seen, key)

    def _encode(
        self, prompt: Prompt, placed: _Placed, seen: Seen | None, key: PromptKey
    ) -> RenderedPrompt:
        text = placed.text
        if placed.conversation.is_continued:
            continued_from = placed.places[-1].end
            if continued_from is None:
                raise InvalidRequest("the chat template can't continue an assistant's message")
            text = text[:continued_from]
        encoded = self._pieces.encode(
            text,
            placed.cuts,
            scope=key.head[0],
            begun=None if seen is None else seen.encoded,
            num_begun=min(placed.num_begun, len(text)),
        )
        spans = self._spans(prompt, placed, encoded, seen)
        if not self._template.changes_given:
            self._seen.add(
                Seen(
                    key=key,
                    conversation=placed.conversation,
                    completed=placed.completed,
                    completion=placed.completion,
                    text=text,
                    plain_cuts=placed.plain_cuts,
                    cuts=placed.cuts,
                    found=placed.found,
                    places=placed.places,
                    spans=spans,
                    encoded=encoded,
                )
            )
        return RenderedPrompt(encoded.token_ids(), spans, self._folded(prompt))

    def _spans(
        self, prompt: Prompt, placed: _Placed, encoded: EncodedText, seen: Seen | None
    ) -> list[SegmentSpan]:
        """Those of a prompt that was seen hold for what lies in pieces of its own."""
        if seen is None or not seen.encoded.begins:
            return segment_spans(prompt, placed.places, encoded)
        num_pieces = seen.encoded.num_unchanged(placed.num_begun - self._controls.longest)
        unchanged = seen.encoded.begins[num_pieces]
        known = {
            segment: seen.spans[segment]
            for segment in range(placed.num_placed)
            if (placed.places[segment].end or 0) <= unchanged
            and placed.places[segment] == seen.places[segment]
        }
        return segment_spans(prompt, placed.places, encoded, known)

    def _folded(self, prompt: Prompt) -> list[int]:
        """The segments of system messages that are told in the user's turn."""
        if not self._traits.folds_late_system:
            return []
        return [
            segment
            for message, segments in zip(prompt.messages, message_segments(prompt), strict=True)
            if is_folded(message, prompt, self._traits)
            for segment in segments
        ]

    def _place_whole(self, prompt: Prompt, *, thinking: bool) -> _Placed:
        """With the prompt as the template takes it: its tools completed as far as it needs."""
        failed: TemplateFails | None = None
        # Templates that fail on a tool are given more of it.
        for completion in range(MAX_COMPLETION + 1 if prompt.tools else 1):
            given = with_complete_tools(prompt, completion)
            conversation = new_conversation(given, self._controls, self._traits)
            try:
                text, built = self._render(conversation, thinking=thinking)
                placed = place_segments(self._template, conversation, text, thinking=thinking)
            except TemplateFails as error:
                failed = failed or error
                continue
            uncut, cuts = placed.without_cuts(conversation.cut)
            completed = [completed_by(head_strings(given), self._controls)]
            completed += [
                completed_by(message_strings(message), self._controls) for message in given.messages
            ]
            written = self._written(completed, uncut.text)
            written_cuts = (
                self._cuts_in_completed(given, uncut.text, written, thinking) if written else None
            )
            return _Placed(
                conversation=conversation.with_built(built),
                completion=completion,
                completed=completed,
                text=uncut.text,
                plain_cuts=cuts,
                cuts=cuts if written_cuts is None else written_cuts,
                found=uncut.places,
                places=in_order(given, uncut.places),
            )
        assert failed is not None
        raise failed

    def _render(
        self, conversation: Conversation, *, thinking: bool
    ) -> tuple[str, Sequence[BuiltMessage]]:
        built = conversation.build(thinking=thinking)
        return self._template.render(built.given), built.messages

    def _written(self, completed: Iterable[frozenset[str]], text: str) -> set[str]:
        """The control tokens' texts in the text that the prompt and the template may have written
        together."""
        return {control for control in set().union(*completed) if control in text}

    def _cuts_in_completed(
        self,
        prompt: Prompt,
        text: str,
        completing: set[str],
        thinking: bool,
        calls: Sequence[KnownCall] = (),
    ) -> list[int] | None:
        """All cuts, also of control tokens' texts that the prompt and the template write together.

        None where the template writes something else for them.
        """
        conversation = new_conversation(
            prompt, self._controls, self._traits, completing=completing, calls=calls
        )
        try:
            cut, _ = self._render(conversation, thinking=thinking)
        except InvalidRequest:
            return None
        placed, cuts = PlacedText(cut, []).without_cuts(conversation.cut)
        return cuts if placed.text == text else None

    def _continue(
        self, prompt: Prompt, seen: Seen, num_known: int, *, thinking: bool
    ) -> _Placed | None:
        """The prompt with what is known of one that has so many first messages of it.

        None where the whole must be rendered with marks.
        """
        given = with_complete_tools(prompt, seen.completion)
        begun = seen.conversation
        whole = continued_conversation(begun, given.messages, num_known, self._controls)
        if whole is None:
            return None
        try:
            text, built = self._render(whole, thinking=thinking)
        except InvalidRequest:
            return None
        uncut, plain_cuts = PlacedText(text, []).without_cuts(whole.cut)
        num_begun = _num_begun(seen, uncut.text, plain_cuts)
        completed = [
            *seen.completed[: num_known + 1],
            *(completed_by(message_strings(m), self._controls) for m in given.messages[num_known:]),
        ]
        written = self._written(completed, uncut.text)
        first = _first_without_place(given, seen, num_begun, num_known)
        segments = [*message_segments(given), range(given.num_segments, given.num_segments)]
        places, cuts = list(seen.found[: segments[first].start]), plain_cuts
        if first < len(given.messages):
            moves_head = _moves_head(given, seen, num_begun, self._traits)
            rendered = (
                self._newest(given, window, written, thinking=thinking)
                for window in windows_of(whole, built, first)
            )
            carried = first_carried(
                rendered, uncut.text, self._controls, num_begun, moves_head, bool(written)
            )
            if carried is None:
                return None
            places[: len(carried.head)] = carried.head
            places.extend(carried.places)
            if written:
                cuts = [*seen.cuts[: bisect_left(seen.cuts, num_begun)], *carried.cuts]
        elif written or num_begun < len(uncut.text):
            return None
        return _Placed(
            conversation=whole.with_built(built),
            completion=seen.completion,
            completed=completed,
            text=uncut.text,
            plain_cuts=plain_cuts,
            cuts=cuts,
            found=places,
            places=in_order(given, places),
            num_begun=num_begun,
            num_placed=segments[first].start,
        )

    def _newest(
        self, given: Prompt, window: Window, completing: set[str], *, thinking: bool
    ) -> Newest | None:
        """The newest messages, rendered without most that is before them."""
        try:
            text, _ = self._render(window.conversation, thinking=thinking)
            placed = place_segments(self._template, window.conversation, text, thinking=thinking)
        except InvalidRequest:
            return None
        uncut, cuts = placed.without_cuts(window.conversation.cut)
        if completing:
            prompt = Prompt([given.messages[i] for i in window.chosen], given.tools, given.system)
            calls = window.conversation.calls
            found = self._cuts_in_completed(prompt, uncut.text, completing, thinking, calls)
            if found is None:
                return None
            cuts = found
        return Newest(window, uncut, cuts)


def _num_begun(seen: Seen, text: str, cuts: Sequence[int]) -> int:
    """How many first characters of a text are those of one that was seen, with their cuts."""
    num_begun = common_length(seen.text, text)
    for cut, other in zip_longest(seen.plain_cuts, cuts):
        if cut != other:
            return min(c for c in (cut, other, num_begun) if c is not None)
    return num_begun


def _moves_head(prompt: Prompt, seen: Seen, num_begun: int, traits: TemplateTraits) -> bool:
    """Do the tools or the system prompt stand elsewhere now? Moving tools never have a place."""
    first = len(prompt.tools) if traits.moves_tools else 0
    head = seen.found[first : len(prompt.tools) + len(prompt.system)]
    return any((place.end or 0) > num_begun for place in head)


def _first_without_place(prompt: Prompt, seen: Seen, num_begun: int, num_known: int) -> int:
    """The first message that is new, or one of whose places is not the one of then any more."""
    segments = message_segments(prompt)
    first = num_known
    while first > 0 and any(
        (seen.found[segment].end or 0) > num_begun for segment in segments[first - 1]
    ):
        first -= 1
    return first
