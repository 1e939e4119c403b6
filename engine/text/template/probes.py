"""What a chat template does, found out by rendering small prompts when a model is loaded."""

from dataclasses import dataclass, replace

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
from engine.text.template.boundaries import PlacedText, in_order, place_segments
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.messages import TemplateTraits, new_conversation, strings_of
from engine.text.tokens.controls import ControlTexts

_USER = Message("user", [TextPart("probe-user")])
# Templates look for the last question by comparing messages, so no two questions are equal.
_SECOND = Message("user", [TextPart("probe-question")])
_ANSWER = Message("assistant", [TextPart("probe-answer")])
_TOOL = Tool("probe_tool", {"type": "object", "properties": {}}, "probe-description")
_SYSTEM = TextPart("probe-system")


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Renders prompts of its own through one template. A refusal is an answer, not an error."""

    template: ChatTemplate
    controls: ControlTexts | None

    def text(self, prompt: Prompt, traits: TemplateTraits, *, thinking: bool = False) -> str | None:
        """The prompt as the template renders it; None where it refuses it."""
        conversation = new_conversation(prompt, self.controls, traits)
        try:
            return self.template.render(conversation.variables({}, thinking=thinking))
        except InvalidRequest:
            return None

    def find_traits(self, traits: TemplateTraits) -> TemplateTraits:
        """The fewest traits beyond those given with which the prompts render.

        What never renders changes nothing.
        """
        for prompt, needle, trait in (
            (Prompt([_USER], system=[_SYSTEM]), _SYSTEM.text, "folds_system"),
            (_calls(1), _TOOL.name, "shortens_ids"),
            (_calls(2), "value-1", "splits_calls"),
            (_calls(1, "probe-text"), "probe-text", "joins_results"),
        ):
            other = replace(traits, **{trait: True})  # type: ignore[arg-type]
            if not self._renders(prompt, needle, traits) and self._renders(prompt, needle, other):
                traits = other
        folding = replace(traits, folds_late_system=True)
        if not self._keeps_late_system(traits) and self._keeps_late_system(folding):
            traits = folding
        # Do the tools come behind an answer that is already given?
        text = self.text(Prompt([_USER, _ANSWER, _SECOND], [_TOOL]), traits) or ""
        moves_tools = 0 <= text.find("probe-answer") < text.find(_TOOL.name)
        return replace(traits, moves_tools=moves_tools)

    def shows_tools(self, traits: TemplateTraits) -> bool:
        return self._renders(Prompt([_USER], [_TOOL]), _TOOL.name, traits)

    def has_tools_first(self, traits: TemplateTraits) -> bool:
        """Do the tools come before the system prompt?"""
        placed = self._place(Prompt([_USER], [_TOOL], [_SYSTEM]), traits)
        if placed is None:
            return False
        tool, system, _ = placed.places
        return tool.end is not None and system.begin is not None and tool.end <= system.begin

    def opens_tag(
        self,
        opening: str,
        closing: str,
        traits: TemplateTraits,
        *,
        thinking: bool,
        after_result: bool,
    ) -> bool:
        """Does the prompt of a new turn end behind an opening tag?"""
        prompt = _calls(1) if after_result else Prompt([_USER])
        text = self.text(prompt, traits, thinking=thinking)
        last = "probe-result" if after_result else "probe-user"
        end = "" if text is None else text.rpartition(last)[2]
        return end.rfind(opening) > end.rfind(closing)

    def find_turn_end(self, traits: TemplateTraits) -> frozenset[TokenId]:
        """The control token right behind an assistant's text."""
        placed = self._place(Prompt([_USER, _ANSWER, _SECOND]), traits)
        if placed is None or placed.places[1].end is None or self.controls is None:
            return frozenset()
        matches = self.controls.matches(placed.text)
        return frozenset(m.token_id for m in matches if m.begin == placed.places[1].end)

    def _keeps_late_system(self, traits: TemplateTraits) -> bool:
        """Does a system message stay where it stands, between two turns and behind the last?"""
        late = Message("system", [TextPart("probe-late")])
        for messages in ([_USER, _ANSWER, late, _SECOND], [_USER, _ANSWER, _SECOND, late]):
            text = self.text(Prompt(messages, system=[_SYSTEM]), traits)
            words = [strings_of(Prompt([message]))[0] for message in messages[1:]]
            places = [-1 if text is None else text.find(word) for word in words]
            if text is None or places != sorted(places) or any(text.count(w) != 1 for w in words):
                return False
        return True

    def _renders(self, prompt: Prompt, needle: str, traits: TemplateTraits) -> bool:
        text = self.text(prompt, traits)
        # A template that knows no content parts may write out Python's own picture of them.
        return text is not None and needle in text and "'type'" not in text

    def _place(self, prompt: Prompt, traits: TemplateTraits) -> PlacedText | None:
        conversation = new_conversation(prompt, self.controls, traits)
        try:
            placed = place_segments(self.template, conversation, thinking=False)
        except InvalidRequest:
            return None
        return PlacedText(placed.text, in_order(prompt, placed.places))


def _calls(count: int, *texts: str) -> Prompt:
    """A turn of calls with ids as ours are, and their results, with texts behind them."""
    ids = [f"toolu_{'0Ab' * 7}{index:03}" for index in range(count)]
    calls: list[Part] = [
        ToolUsePart(call_id, _TOOL.name, {"key": f"value-{index}"})
        for index, call_id in enumerate(ids)
    ]
    results: list[Part] = [ToolResultPart(call_id, "probe-result") for call_id in ids]
    results += [TextPart(text) for text in texts]
    return Prompt([_USER, Message("assistant", calls), Message("user", results)])
