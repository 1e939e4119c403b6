"""What a chat template does, found out by rendering small prompts when a model is loaded."""

from dataclasses import dataclass
from functools import partial

from engine.cache.ids import TokenId
from engine.errors import InvalidRequest
from engine.protocol import (
    Message,
    Part,
    Prompt,
    TextPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.formats.reasoning import ReasoningFormat
from engine.text.template.boundaries import PlacedText, in_order, place_segments
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.conversation import new_conversation
from engine.text.template.traits import TemplateTraits, TraitProbes, find_traits
from engine.text.tokens.pieces import PieceTokenizer

_USER = Message("user", [TextPart("probe-user")])
# Templates look for the last question by comparing messages, so no two questions are equal.
_SECOND = Message("user", [TextPart("probe-question")])
_TOOL = Tool("probe_tool", {"type": "object", "properties": {}}, "probe-description")
_SYSTEM = TextPart("probe-system")


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Renders prompts of its own through one template. A refusal is an answer, not an error."""

    template: ChatTemplate
    pieces: PieceTokenizer

    def find_traits(self, known: TemplateTraits | None = None) -> TemplateTraits:
        return find_traits(
            TraitProbes(
                system=partial(self._renders, Prompt([_USER], system=[_SYSTEM]), _SYSTEM.text),
                call=partial(self._renders, _calls(1), "probe_tool"),
                two_calls=partial(self._renders, _calls(2), "value-1"),
                result_and_text=partial(self._renders, _calls(1, "probe-text"), "probe-text"),
                moves_tools=self._moves_tools,
                late_system=self._keeps_late_system,
            ),
            known,
        )

    def shows_tools(self, traits: TemplateTraits) -> bool:
        return self._renders(Prompt([_USER], [_TOOL]), _TOOL.name, traits)

    def has_tools_first(self, traits: TemplateTraits) -> bool:
        """Do the tools come before the system prompt?"""
        placed = self._place(Prompt([_USER], [_TOOL], [_SYSTEM]), traits)
        if placed is None:
            return False
        tool, system, _ = placed.places
        return tool.end is not None and system.begin is not None and tool.end <= system.begin

    def shown_call(self, traits: TemplateTraits) -> str:
        """What the template renders from a call on; nothing where it refuses calls."""
        text = self._text(_calls(1), traits)
        return "" if text is None else text.partition("probe-user")[2]

    def opens_thinking(
        self,
        traits: TemplateTraits,
        tags: ReasoningFormat,
        *,
        thinking: bool,
        after_result: bool = False,
    ) -> bool:
        """Does the prompt of a new turn end inside the thinking tag?"""
        prompt = _calls(1) if after_result else Prompt([_USER])
        text = self._text(prompt, traits, thinking=thinking)
        last = "probe-result" if after_result else "probe-user"
        end = "" if text is None else text.rpartition(last)[2]
        return end.rfind(tags.open) > end.rfind(tags.close)

    def find_turn_end(self, traits: TemplateTraits) -> frozenset[TokenId]:
        """The control token right behind an assistant's text."""
        controls = self.pieces.controls
        prompt = Prompt([_USER, Message("assistant", [TextPart("probe-answer")]), _SECOND])
        placed = self._place(prompt, traits)
        end = None if placed is None else placed.places[1].end
        if placed is None or end is None:
            return frozenset()
        return frozenset(m.token_id for m in controls.matches(placed.text) if m.begin == end)

    def _moves_tools(self, traits: TemplateTraits) -> bool:
        """Do the tools come behind an answer that is already given?"""
        answer = Message("assistant", [TextPart("probe-answer")])
        text = self._text(Prompt([_USER, answer, _SECOND], [_TOOL]), traits) or ""
        return 0 <= text.find("probe-answer") < text.find(_TOOL.name)

    def _keeps_late_system(self, traits: TemplateTraits) -> bool:
        """Does a system message stay where it stands, between two turns and behind the last?"""
        answer, late = Message("assistant", [TextPart("probe-answer")]), "probe-late"
        told = Message("system", [TextPart(late)])
        between = self._text(Prompt([_USER, answer, told, _SECOND], system=[_SYSTEM]), traits)
        behind = self._text(Prompt([_USER, answer, _SECOND, told], system=[_SYSTEM]), traits)
        if between is None or behind is None:
            return False
        return _in_order(between, "probe-answer", late, "probe-question") and _in_order(
            behind, "probe-answer", "probe-question", late
        )

    def _renders(self, prompt: Prompt, needle: str, traits: TemplateTraits) -> bool:
        text = self._text(prompt, traits)
        # A template that knows no content parts may write out Python's own picture of them.
        return text is not None and needle in text and "'type'" not in text

    def _text(
        self, prompt: Prompt, traits: TemplateTraits, *, thinking: bool = False
    ) -> str | None:
        conversation = new_conversation(prompt, self.pieces.controls, traits)
        try:
            return self.template.render(conversation.variables({}, thinking=thinking))
        except InvalidRequest:
            return None

    def _place(self, prompt: Prompt, traits: TemplateTraits) -> PlacedText | None:
        conversation = new_conversation(prompt, self.pieces.controls, traits)
        try:
            text = self.template.render(conversation.variables({}, thinking=False))
            placed = place_segments(self.template, conversation, text, thinking=False)
        except InvalidRequest:
            return None
        return PlacedText(text, in_order(prompt, placed.places))


def _calls(count: int, *texts: str) -> Prompt:
    """A turn of calls with ids as ours are, and their results, with texts behind them."""
    ids = [f"toolu_{'0Ab' * 7}{index:03}" for index in range(count)]
    calls: list[Part] = [
        ToolUsePart(call_id, _TOOL.name, {"key": f"value-{index}"})
        for index, call_id in enumerate(ids)
    ]
    results = [ToolResultPart(call_id, "probe-result") for call_id in ids]
    return Prompt(
        [
            _USER,
            Message("assistant", calls),
            Message("user", [*results, *(TextPart(text) for text in texts)]),
        ]
    )


def _in_order(text: str, *words: str) -> bool:
    """Does each of the words come once, in this order?"""
    places = [text.find(word) for word in words]
    return places == sorted(places) and all(text.count(word) == 1 for word in words)
