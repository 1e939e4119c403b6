"""What a model writes and what its template takes, all of it proven when the model is loaded."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from engine.protocol import GenerateRequest, Message, Prompt, Sampling, TextDelta, TextPart
from engine.text.errors import TemplateRefused
from engine.text.formats.call_format import CallFormat
from engine.text.formats.call_stream import FormatParser
from engine.text.formats.harmony import HarmonyParser
from engine.text.formats.proof import LAST_WORD, PROBE_TOOL, CallProof, ProvenCalls, turn_begin
from engine.text.formats.reasoning import (
    HARMONY,
    REASONING_FORMATS,
    ReasoningFormat,
    ThinkingParser,
)
from engine.text.formats.table import TOOL_FORMATS
from engine.text.formats.thinking_proof import ThinkingProof
from engine.text.formats.tool_calls import PlainText
from engine.text.formats.turn_ends import behind_call, declared, within_turn
from engine.text.template.messages import TemplateTraits
from engine.text.template.probes import TemplateProbe

log = structlog.get_logger()
_MAX_SHOWN = 300
_ANSWER = "probe-answer"
_QUESTION = Message("user", [TextPart("probe-question")])
_ANSWERED = Message("assistant", [TextPart(_ANSWER)])


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """Names of `TOOL_FORMATS` and `REASONING_FORMATS`, `auto` (what is proven) or `none`."""

    tools: str = "auto"
    reasoning: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """`tool_format` and `reasoning_format` are None where nothing is known of the template's.

    `traits` is how it takes calls and thinking. `calls` is None where no format was proven.
    `ends` are texts of control tokens that end turns, `no_ends` of such that stand inside of turns.
    """

    tool_format: str | None
    reasoning_format: str | None
    traits: TemplateTraits
    calls: ProvenCalls | None
    tags: ReasoningFormat | None
    ends: frozenset[str]
    no_ends: frozenset[str]

    @property
    def call_format(self) -> CallFormat | None:
        if self.calls is not None:
            return self.calls.format
        return None if self.tool_format is None else TOOL_FORMATS[self.tool_format]

    @property
    def told_calls(self) -> str:
        """How to write a call, told to a model whose template does not tell it."""
        of = self.call_format
        if of is None or not of.written:
            return ""
        written = of.written[0]
        call = written.begin + written.call + written.end
        for place, word in (("{name}", "NAME"), ("{input}", "ARGUMENTS"), ("{digits}", "0")):
            call = call.replace(place, word)
        return f"To call tools write this, with the arguments as one JSON object:\n{call}"

    @property
    def is_harmony(self) -> bool:
        return HARMONY in (self.tool_format, self.reasoning_format)

    @property
    def thinking_markers(self) -> frozenset[str]:
        if self.is_harmony:
            return TOOL_FORMATS[HARMONY].markers
        return frozenset() if self.tags is None else self.tags.markers

    @property
    def markers(self) -> frozenset[str]:
        of = self.call_format
        return self.thinking_markers | (frozenset() if of is None else of.markers)

    def new_parser(
        self, request: GenerateRequest, new_id: Callable[[], str], *, is_open: bool
    ) -> FormatParser:
        """For one choice; `is_open`: the prompt ends inside the thinking."""
        tools = request.prompt.callable_tools if request.tool_choice.mode != "none" else []
        if self.is_harmony:
            return HarmonyParser(new_id, [tool.name for tool in tools])
        calls: FormatParser = PlainText()
        if tools and self.call_format is not None:
            calls = self.call_format.new_parser(new_id, tools)
        if self.tags is not None:
            calls = ThinkingParser(self.tags, calls, is_open=is_open)
        return calls


def find_formats(
    probe: TemplateProbe,
    choice: FormatChoice,
    known_ends: Iterable[str] = (),
) -> ModelFormats:
    """Render and read back. `known_ends` are the texts of the tokens that the model declares."""
    _check("tool_format", choice.tools, TOOL_FORMATS)
    _check("reasoning_format", choice.reasoning, (*REASONING_FORMATS, HARMONY))
    proof = CallProof(probe, tuple(known_ends))
    calls = None if choice.tools == "none" else proof.find()
    tool_format = None if calls is None else calls.name
    if calls is None and choice.tools == "auto":
        _tell_unknown(proof)
    if choice.tools not in ("auto", "none") and choice.tools != tool_format:
        log.warning(
            "the tool format that is set is not the one that the template proves",
            set=choice.tools,
            proven=tool_format,
        )
        tool_format, calls = (
            choice.tools,
            calls
            and ProvenCalls(
                choice.tools, TOOL_FORMATS[choice.tools], calls.traits, "", calls.probe
            ),
        )
    traits = TemplateTraits() if calls is None else calls.traits
    thinking = ThinkingProof(probe, has_calls=calls is not None).find(traits, choice.reasoning)
    ends = declared(tool_format, thinking.name)
    pattern = None if probe.controls is None else probe.controls.pattern
    if calls is not None and calls.shown:
        turn = proof.shown_turn(calls)
        behind = behind_call(turn, LAST_WORD, pattern, calls.format.markers)
        ends |= {behind} if behind is not None else set()
    no_ends = within_turn(thinking.inside, pattern) - declared(tool_format, thinking.name)
    tags = thinking.tags or REASONING_FORMATS.get(thinking.name or "")
    no_ends |= set() if tags is None else tags.markers
    formats = ModelFormats(
        tool_format=tool_format,
        reasoning_format=thinking.name,
        traits=thinking.traits,
        calls=calls,
        tags=tags,
        ends=ends - no_ends,
        no_ends=no_ends,
    )
    _tell_unread_answer(probe, formats)
    return formats


def _tell_unknown(proof: CallProof) -> None:
    shown = proof.shown([{"word": LAST_WORD}], TemplateTraits())
    if shown is not None and PROBE_TOOL.name in shown:
        log.warning(
            "no known format reads the calls that the chat template writes: tools are refused",
            written=shown[:_MAX_SHOWN],
        )


def _tell_unread_answer(probe: TemplateProbe, formats: ModelFormats) -> None:
    """Log what the template writes before an answer, where a client would get it as text."""
    asked, answered = (
        probe.text(Prompt(messages), formats.traits)
        for messages in ([_QUESTION], [_QUESTION, _ANSWERED, _QUESTION])
    )
    if asked is None or answered is None:
        return
    before = answered[turn_begin(asked, answered) :].partition(_ANSWER)[0]
    request = GenerateRequest(
        request_id="", scope="", prompt=Prompt([_QUESTION]), sampling=Sampling(max_tokens=1)
    )
    parser = formats.new_parser(request, str, is_open=False)
    deltas = [*parser.feed(before + _ANSWER), *parser.close()]
    said = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    if said.strip() != _ANSWER:
        log.warning(
            "no known format reads what the chat template writes before an answer: a client gets "
            "it as text",
            written=before[:_MAX_SHOWN],
        )


def _check(setting: str, name: str, known: Iterable[str]) -> None:
    """Raises TemplateRefused for a name that is no format's."""
    names = ["auto", "none", *known]
    if name not in names:
        raise TemplateRefused(f"`{setting}`: {name!r} is none of {', '.join(names)}")
