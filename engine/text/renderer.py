"""Prompts to tokens and tokens to deltas, for one model. Knows its template and its tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Literal

import structlog

from engine.cache.ids import TokenId
from engine.errors import InvalidRequest
from engine.protocol import GenerateRequest, Prompt, ThinkingPart
from engine.schedule.output import OutputParser
from engine.text.errors import TemplateRefused
from engine.text.files import PromptFiles, read_prompt_files
from engine.text.formats.call_stream import FormatParser
from engine.text.formats.call_styles import find_call_style
from engine.text.formats.reasoning import (
    REASONING_FORMATS,
    ReasoningFormat,
    ThinkingParser,
    find_reasoning_format,
)
from engine.text.formats.stops import StopFinder
from engine.text.formats.tool_calls import (
    TOOL_FORMATS,
    PlainText,
    find_tool_format,
    new_tool_use_id,
)
from engine.text.formats.turn_parser import TurnEnd, TurnParser
from engine.text.grammar import CallStyle, GrammarWriter, ThinkingRule
from engine.text.rendered import RenderedPrompt
from engine.text.template.boundaries import PlacedText, place_segments
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.conversation import new_conversation
from engine.text.template.probes import TemplateProbe
from engine.text.tokens.detokenize import Vocabulary
from engine.text.tokens.pieces import PieceTokenizer
from engine.text.tokens.raw import render_text
from engine.text.tokens.spans import Stretch, segment_spans

PrefixOrder = Literal["tools_first", "template"]
log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """Names of `TOOL_FORMATS` and `REASONING_FORMATS`, `auto` (the template tells) or `none`."""

    tools: str = "auto"
    reasoning: str = "auto"


class ChatRenderer:
    """Renders, tokenizes and parses for one model; may be used from one thread at a time.

    `tool_format` and `reasoning_format` are None where the template shows none that is known.
    `prefix_order` is told from a render: whether the tools come before the system prompt.
    `end_token_ids` end a turn: those the model declares and the one its template ends turns with.
    `can_constrain` says whether the grammar library can use the tokenizer.
    Raises TemplateRefused where a tool format is demanded of a template that renders no tools.
    """

    def __init__(
        self,
        files: PromptFiles,
        *,
        formats: FormatChoice | None = None,
        now: Callable[[], datetime] = datetime.now,
        new_id: Callable[[], str] = new_tool_use_id,
    ) -> None:
        self._template = ChatTemplate(files.templates, files.special_tokens, now)
        self.tokenizer = files.tokenizer
        self._pieces = PieceTokenizer(files.tokenizer)
        self._new_id = new_id
        probe = TemplateProbe(self._template, self._pieces)
        self.traits = probe.find_traits()
        formats = formats or FormatChoice()
        self.tool_format = self._choose_tool_format(formats.tools, probe)
        self.reasoning_format = formats.reasoning if formats.reasoning != "none" else None
        if formats.reasoning == "auto":
            self.reasoning_format = find_reasoning_format(self._template.source)
        self.prefix_order: PrefixOrder = (
            "tools_first" if probe.has_tools_first(self.traits) else "template"
        )
        self.end_token_ids = files.end_token_ids | probe.find_turn_end(self.traits)
        self._tags: ReasoningFormat | None = None
        self._opens_thinking = {False: False, True: False}
        markers: set[str] = set()
        if self.reasoning_format is not None:
            self._tags = REASONING_FORMATS[self.reasoning_format]
            markers = {self._tags.open, self._tags.close}
            self._opens_thinking = {
                thinking: probe.opens_thinking(self.traits, self._tags, thinking=thinking)
                for thinking in (False, True)
            }
        self._vocabulary = Vocabulary(files.tokenizer).with_text(markers)
        self._tool_vocabulary = self._vocabulary
        if self.tool_format is not None:
            markers |= TOOL_FORMATS[self.tool_format].MARKERS
            self._tool_vocabulary = self._vocabulary.with_text(markers)
        self._writer = self._new_writer()
        self._style: CallStyle | None = None
        if self._writer is not None and self.tool_format is not None:
            shown = probe.shown_call(self.traits)
            self._style = find_call_style(self.tool_format, shown, self._writer)

    @property
    def can_constrain(self) -> bool:
        return self._writer is not None

    @classmethod
    def from_model(cls, model: str, formats: FormatChoice | None = None) -> "ChatRenderer":
        """From a Hugging Face directory or hub id. Raises TemplateRefused."""
        return cls(read_prompt_files(model), formats=formats)

    def render(self, prompt: Prompt, *, thinking: bool, scope: str = "") -> RenderedPrompt:
        """Tokens and segments. Raises InvalidRequest where the template refuses the prompt.

        A prompt that ends with an assistant's message is cut off behind it, to be continued.
        `scope` separates tenants in the memory of what was tokenized before.
        """
        if prompt.text is not None:
            return render_text(self.tokenizer, prompt.text)
        conversation = new_conversation(prompt, self._pieces.controls, self.traits)
        placed = place_segments(self._template, conversation, thinking=thinking)
        end = len(placed.text)
        if conversation.is_continued:
            continued_from = placed.places[-1].end
            if continued_from is None:
                raise InvalidRequest("the chat template can't continue an assistant's message")
            end = continued_from
        stretches = self._tokenize(placed, end, conversation.cut, scope)
        token_ids: list[TokenId] = []
        for stretch in stretches:
            for piece in stretch.pieces:
                token_ids.extend(piece.token_ids)
        return RenderedPrompt(token_ids, segment_spans(prompt, placed, conversation.cut, stretches))

    def parser(self, request: GenerateRequest) -> OutputParser:
        """A parser for one choice of the request.

        Raises InvalidRequest where what the request demands of the output can't be guaranteed.
        """
        calls: FormatParser = PlainText()
        vocabulary = self._vocabulary
        parses_calls = request.prompt.tools and request.tool_choice.mode != "none"
        if parses_calls and self.tool_format is not None:
            names = [tool.name for tool in request.prompt.tools]
            calls = TOOL_FORMATS[self.tool_format](self._new_id, names)
            vocabulary = self._tool_vocabulary
        is_open = self._begins_thinking(request)
        rule: ThinkingRule | None = None
        if self._tags is not None:
            calls = ThinkingParser(self._tags, calls, is_open=is_open)
            rule = ThinkingRule(self._tags, is_open) if is_open or request.thinking else None
        constraint = None
        if self._writer is not None:
            constraint = self._writer.constraint(request, self._style, rule)
        return TurnParser(
            vocabulary.detokenizer(),
            StopFinder(request.sampling.stop_sequences),
            calls,
            TurnEnd(
                token_ids=frozenset() if request.sampling.ignore_eos else self.end_token_ids,
                after_first_call=not request.tool_choice.parallel,
            ),
            constraint,
        )

    def _begins_thinking(self, request: GenerateRequest) -> bool:
        """Does the prompt end inside a thinking tag?"""
        if request.prompt.text is not None:
            return False
        last = request.prompt.messages[-1] if request.prompt.messages else None
        if last is not None and last.role == "assistant":
            ends_thinking = bool(last.parts) and isinstance(last.parts[-1], ThinkingPart)
            return self._tags is not None and ends_thinking
        return self._opens_thinking[request.thinking]

    def _choose_tool_format(self, wanted: str, probe: TemplateProbe) -> str | None:
        if wanted == "none":
            return None
        if not probe.shows_tools(self.traits):
            if wanted == "auto":
                return None
            raise TemplateRefused("`tool_format`: the chat template does not render tools")
        return find_tool_format(self._template.source) if wanted == "auto" else wanted

    def _new_writer(self) -> GrammarWriter | None:
        try:
            return GrammarWriter(self.tokenizer, self.end_token_ids)
        except ValueError as error:
            log.warning(
                "no forced tools: the grammar library refuses the tokenizer", why=str(error)
            )
            return None

    def _tokenize(self, placed: PlacedText, end: int, cut: str, scope: str) -> list[Stretch]:
        """Encode the text between neighbouring segment ends, and between cuts, separately."""
        ends = {place.end for place in placed.places if place.end is not None}
        borders = sorted({0, end} | {place_end for place_end in ends if place_end < end})
        stretches: list[Stretch] = []
        num_tokens = 0
        for begin, border in pairwise(borders):
            texts = placed.text[begin:border].split(cut)
            pieces = [
                self._pieces.encode(text, is_first=begin == 0 and index == 0, scope=scope)
                for index, text in enumerate(texts)
            ]
            lengths = [len(text) for text in texts]
            stretches.append(Stretch(begin, border, num_tokens, pieces, lengths))
            num_tokens += sum(len(piece.token_ids) for piece in pieces)
        stretches.append(Stretch(end, end, num_tokens, [], []))
        return stretches
