"""Which format a template's calls have: the one whose parser reads back the call that was rendered.

At load a small conversation with a known call is rendered in every way in which templates take
calls, and every format's parser reads the result. A format is taken only if it finds exactly that
call. A template in an unknown format has none: its tools are refused,
and no markup is handed out as text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from engine.protocol import (
    Delta,
    Message,
    Prompt,
    TextPart,
    Tool,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from engine.text.formats.call_format import CallFormat, Written
from engine.text.formats.calls_read import calls_of
from engine.text.formats.derived import Derivation
from engine.text.formats.table import TOOL_FORMATS
from engine.text.template.messages import Replay, TemplateTraits, WrittenCalls
from engine.text.template.probes import TemplateProbe

_QUESTION, _ANSWER, _RESULT = "probe-question", "probe-answer", "probe-result"
_NAME = "probe_tool"
_LAST = "probe-last"
# In the order of the alphabet, since some templates sort arguments by it.
_PROPERTIES: dict[str, Any] = {
    "count": {"type": "integer", "description": "probe"},
    "flag": {"type": "boolean", "description": "probe"},
    "more": {"type": "object", "properties": {"key": {"type": "string"}}, "description": "probe"},
    "ratio": {"type": "number", "description": "probe"},
    "rows": {"type": "array", "items": {"type": "string"}, "description": "probe"},
    "text": {"type": "string", "description": "probe"},
    "word": {"type": "string", "description": "probe"},
}
PROBE_TOOL = Tool(
    _NAME, {"type": "object", "properties": _PROPERTIES, "required": ["word"]}, "probe-description"
)
# From all that JSON can say to the least that a call needs: some templates write strings without
# escapes, some write no nested values.
_INPUTS: tuple[dict[str, Any], ...] = (
    {
        "count": 3,
        "flag": True,
        "more": {"key": "z"},
        "ratio": 1.5,
        "rows": ["x", "y"],
        "text": 'a "b" <c>\n\\d é',
        "word": _LAST,
    },
    {"count": 3, "flag": True, "ratio": 1.5, "text": "probe it", "word": _LAST},
    {"text": "probe it", "word": _LAST},
)
DERIVED = "template"
"""The name of a format that is known from the template alone."""
LAST_WORD = _LAST
"""What stands last in every probe's input."""
_OTHER_INPUT = {"word": "another one"}


@dataclass(frozen=True, slots=True)
class ProvenCalls:
    """A format that a template's own rendering proved.

    `shown` is a call as the template writes it, from the turn's first character on, and `probe` the
    input that stands in it. `written` is that way as texts, None where no such form was derived.
    """

    name: str
    format: CallFormat
    traits: TemplateTraits
    shown: str
    probe: Mapping[str, Any]
    written: Written | None = None


@dataclass(frozen=True, slots=True)
class CallProof:
    """Renders probes through one template. `ends` are the texts that may end a turn."""

    probe: TemplateProbe
    ends: Sequence[str] = ()

    def find(self, wanted: str = "auto") -> ProvenCalls | None:
        """The format that is proven, of those wanted (`auto`: any); None where none is."""
        formats = {n: f for n, f in TOOL_FORMATS.items() if wanted in ("auto", n)}
        for probe in _INPUTS:
            proven = self._find_rendered(formats, probe)
            if proven is not None:
                return self._complete(proven)
        if wanted == "auto" and (proven := self._find_derived()) is not None:
            return self._complete(proven)
        return self._find_written(formats)

    def _find_rendered(
        self, formats: Mapping[str, CallFormat], probe: dict[str, Any]
    ) -> ProvenCalls | None:
        for traits in _ways():
            shown = self.shown([probe], traits)
            if shown is None or _NAME not in shown:
                continue
            for name, of in formats.items():
                if _reads(of, shown, [probe]):
                    return ProvenCalls(name, of, traits, shown, probe)
        return None

    def _find_derived(self) -> ProvenCalls | None:
        """A format of the template's own, which has to read all that JSON can say."""
        for traits in _ways():
            of = self._derive(traits)
            if of is None:
                continue
            if all(self._reads(of, [given], traits) for given in (_INPUTS[0], _OTHER_INPUT, {})):
                shown = self.shown([_INPUTS[0]], traits) or ""
                return ProvenCalls(DERIVED, of, traits, shown, _INPUTS[0])
        return None

    def _derive(self, traits: TemplateTraits) -> CallFormat | None:
        def show(inputs: Sequence[dict[str, Any]]) -> str | None:
            return self.shown(inputs, traits)

        pattern = None if self.probe.controls is None else self.probe.controls.pattern
        return Derivation(show, _NAME, pattern, (*self.ends, *self._answer_ends())).derive()

    def _answer_ends(self) -> list[str]:
        """The control token that the template writes behind an answer."""
        answered = [_user(), Message("assistant", [TextPart(_ANSWER)]), _user()]
        text = self.probe.text(Prompt(answered), TemplateTraits())
        pattern = None if self.probe.controls is None else self.probe.controls.pattern
        if text is None or pattern is None:
            return []
        found = pattern.match(text, text.find(_ANSWER) + len(_ANSWER))
        return [] if found is None else [found.group()]

    def _complete(self, proven: ProvenCalls) -> ProvenCalls:
        """How the template takes what a turn may have beside one call."""
        of = proven.format
        probe = dict(proven.probe)
        traits = self._shorter(of, proven.traits, probe)
        two = [probe, _OTHER_INPUT]
        for changed in ({}, {"splits_calls": True}):
            other = replace(traits, **changed)  # type: ignore[arg-type]
            if self._reads(of, two, other):
                break
            joined = replace(
                other, splits_calls=True, replay=replace(other.replay, interleaves=True)
            )
            if changed and self._reads(of, two, joined):
                other = joined
                break
        else:
            other = replace(traits, splits_calls=True)
        if other.splits_calls and self._names_results_by_the_last_call(other):
            other = replace(other, replay=replace(other.replay, interleaves=True))
        traits = other
        if not self._reads(of, [probe], traits, text="probe-text"):
            split = replace(traits, replay=replace(traits.replay, splits_text=True))
            if self._reads(of, [probe], split, text="probe-text"):
                traits = split
        derived = self._derive(traits)
        return replace(
            proven,
            traits=traits,
            shown=self.shown([probe], traits) or proven.shown,
            written=None if derived is None else derived.written[0],
        )

    def _shorter(
        self, of: CallFormat, traits: TemplateTraits, probe: dict[str, Any]
    ) -> TemplateTraits:
        """Without content where an empty one leaves something behind, as an empty answer."""
        other = replace(traits, replay=replace(traits.replay, null_content=True))
        texts = [self._text([probe], way) for way in (traits, other)]
        if None in texts or not self._reads(of, [probe], other):
            return traits
        return other if len(texts[1] or "") < len(texts[0] or "") else traits

    def _names_results_by_the_last_call(self, traits: TemplateTraits) -> bool:
        """Two results of two tools: does the first one carry the second one's name?"""
        tools = [PROBE_TOOL, replace_name(PROBE_TOOL, "other_tool")]
        prompt = _calling([_OTHER_INPUT, _OTHER_INPUT], names=[tool.name for tool in tools])
        text = self.probe.text(Prompt(prompt.messages, tools), traits)
        if text is None:
            return False
        behind = text[text.rfind(_QUESTION) :]
        at = behind.find(_RESULT)
        header = behind[:at] if at >= 0 else ""
        last = max(header.rfind(tool.name) for tool in tools)
        return last >= 0 and behind.count("other_tool") > 2 and header.rfind(_NAME) < last

    def _find_written(self, formats: Mapping[str, CallFormat]) -> ProvenCalls | None:
        """A format that the template tells its model to write, and itself never does."""
        prompts = [Prompt([_user()], tools) for tools in ([PROBE_TOOL], [])]
        told, plain = (self.probe.text(prompt, TemplateTraits()) for prompt in prompts)
        if told is None or plain is None or _NAME not in told:
            return None
        for name, of in formats.items():
            marker = of.written[0].begin.rstrip("[ ") if of.written else ""
            if not of.in_content or marker not in told:
                continue
            traits = TemplateTraits(replay=Replay(written=_written(of)))
            for probe in _INPUTS[:1]:
                shown = self.shown([probe], traits)
                if shown is not None and _reads(of, shown, [probe]):
                    return ProvenCalls(name, of, traits, shown, probe)
        return None

    def _reads(
        self, of: CallFormat, inputs: list[dict[str, Any]], traits: TemplateTraits, text: str = ""
    ) -> bool:
        shown = self.shown(inputs, traits, text=text)
        return shown is not None and _reads(of, shown, inputs)

    def shown_turn(self, proven: ProvenCalls) -> str:
        """A call and what the template writes behind it, up to its result."""
        endless = replace(self, ends=())
        return endless.shown([dict(proven.probe)], proven.traits) or ""

    def shown(
        self, inputs: Sequence[dict[str, Any]], traits: TemplateTraits, *, text: str = ""
    ) -> str | None:
        """What the template writes for a turn of calls, from where the model's own text begins.

        It ends before the first result, and at a turn's end where that is known.
        """
        asked = self.probe.text(Prompt([_user()], [PROBE_TOOL]), traits)
        called = self._text(inputs, traits, text=text)
        if asked is None or called is None:
            return None
        turn = called[turn_begin(asked, called) :]
        results = turn.find(_RESULT)
        turn = turn if results < 0 else turn[:results]
        ends = [at for end in self.ends if (at := turn.find(end)) >= 0]
        return turn[: min(ends)] if ends and len(inputs) == 1 else turn

    def _text(
        self, inputs: Sequence[dict[str, Any]], traits: TemplateTraits, *, text: str = ""
    ) -> str | None:
        prompt = _calling(inputs, text=text)
        return self.probe.text(Prompt(prompt.messages, [PROBE_TOOL]), traits)


def turn_begin(asked: str, answered: str) -> int:
    """Where the model's text begins in a rendered turn, by the prompt that it answered.

    A template may write a finished turn otherwise than its generation prompt begins one. Then the
    turn begins where the two differ, or at the markup that holds the first difference.
    """
    if answered.startswith(asked):
        return len(asked)
    pairs = zip(asked, answered, strict=False)
    begin = next((at for at, (one, other) in enumerate(pairs) if one != other), len(answered))
    opened = max(answered.rfind(bracket, 0, begin) for bracket in "<[")
    if opened >= 0 and not re.search(r"[>\]]", answered[opened:begin]):
        return opened
    return begin


def read_calls(of: CallFormat, text: str, tools: Sequence[Tool]) -> list[tuple[str, Any]]:
    """The calls that a format's parser finds in a whole turn."""
    parser = of.new_parser(lambda: "probe-id", tools)
    deltas: list[Delta] = [*parser.feed(text), *parser.close()]
    return calls_of([d for d in deltas if isinstance(d, ToolUseStart | ToolInputDelta)])


def replace_name(tool: Tool, name: str) -> Tool:
    return Tool(name, tool.input_schema, tool.description)


def _reads(of: CallFormat, shown: str, inputs: Sequence[dict[str, Any]]) -> bool:
    expected = [(_NAME, dict(given)) for given in inputs]
    return of.opening in shown and read_calls(of, shown, [PROBE_TOOL]) == expected


def _ways() -> Iterator[TemplateTraits]:
    """The ways to hand a call to a template, the usual ones first."""
    for names_ids, shortens_ids, null_content, string_arguments in product((False, True), repeat=4):
        if not (names_ids and shortens_ids):
            yield TemplateTraits(
                shortens_ids=shortens_ids,
                replay=Replay(
                    names_ids=names_ids,
                    null_content=null_content,
                    string_arguments=string_arguments,
                ),
            )


def _user() -> Message:
    return Message("user", [TextPart(_QUESTION)])


def _calling(
    inputs: Sequence[dict[str, Any]], *, text: str = "", names: Sequence[str] = ()
) -> Prompt:
    """A question, a turn of calls with ids as ours are, and the results."""
    ids = [f"toolu_{'0Ab' * 7}{index:03}" for index in range(len(inputs))]
    said = [TextPart(text)] if text else []
    calls = [
        ToolUsePart(call_id, names[index] if names else _NAME, given)
        for index, (call_id, given) in enumerate(zip(ids, inputs, strict=True))
    ]
    results = [ToolResultPart(call_id, _RESULT) for call_id in ids]
    return Prompt([_user(), Message("assistant", [*said, *calls]), Message("user", [*results])])


def _written(of: CallFormat) -> WrittenCalls:
    written = of.written[0]
    before, _, behind = written.call.partition("{input}")
    return WrittenCalls(
        begin=written.begin,
        before=before,
        behind=behind,
        separator=written.separator,
        end=written.end,
    )
