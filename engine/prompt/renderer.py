"""Prompts to tokens and tokens to deltas, for one model. Knows its template and its tokenizer."""

from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from typing import Literal, NamedTuple

from engine.blocks.block import TokenId
from engine.core.output import OutputParser
from engine.errors import InvalidRequest
from engine.prompt.boundaries import PlacedText, place_segments
from engine.prompt.conversation import new_conversation
from engine.prompt.detokenize import Vocabulary
from engine.prompt.files import PromptFiles, read_prompt_files
from engine.prompt.parser import TurnEnd, TurnParser
from engine.prompt.raw import render_text
from engine.prompt.rendered import RenderedPrompt
from engine.prompt.spans import Stretch, segment_spans
from engine.prompt.stops import StopFinder
from engine.prompt.template import ChatTemplate
from engine.prompt.tokens import PieceTokenizer
from engine.prompt.toolcalls import (
    TOOL_FORMATS,
    FormatParser,
    PlainText,
    find_tool_format,
    new_tool_use_id,
)
from engine.protocol import GenerateRequest, Message, Prompt, TextPart, Tool

PrefixOrder = Literal["tools_first", "template"]


class ChatRenderer:
    """Renders, tokenizes and parses for one model; may be used from one thread at a time.

    `tool_format` and `reasoning_format` are None where the template shows none that is known.
    `prefix_order` is told from a render: whether the tools come before the system prompt.
    `end_token_ids` end a turn: those the model declares and the one its template ends turns with.
    """

    def __init__(
        self,
        files: PromptFiles,
        *,
        now: Callable[[], datetime] = datetime.now,
        new_id: Callable[[], str] = new_tool_use_id,
    ) -> None:
        self._template = ChatTemplate(files.templates, files.special_tokens, now)
        self.tokenizer = files.tokenizer
        self._pieces = PieceTokenizer(files.tokenizer)
        self._new_id = new_id
        vocabulary = Vocabulary(files.tokenizer)
        self._vocabulary = vocabulary
        self._tool_vocabulary = vocabulary
        self.reasoning_format: str | None = None
        tools = self._probe_tools()
        self.tool_format = tools.format
        self.prefix_order = tools.order
        if self.tool_format is not None:
            markers = TOOL_FORMATS[self.tool_format].MARKERS
            self._tool_vocabulary = vocabulary.with_text(set(markers))
        self.end_token_ids = files.end_token_ids | self._probe_turn_end()

    @classmethod
    def from_model(cls, model: str) -> "ChatRenderer":
        """From a Hugging Face directory or hub id. Raises TemplateRefused."""
        return cls(read_prompt_files(model))

    def render(self, prompt: Prompt, *, thinking: bool, scope: str = "") -> RenderedPrompt:
        """Tokens and segments. Raises InvalidRequest where the template refuses the prompt.

        A prompt that ends with an assistant's message is cut off behind it, to be continued.
        `scope` separates tenants in the memory of what was tokenized before.
        """
        if prompt.text is not None:
            return render_text(self.tokenizer, prompt.text)
        conversation = new_conversation(prompt, self._pieces.controls)
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
        """A parser for one choice of the request."""
        calls: FormatParser = PlainText()
        vocabulary = self._vocabulary
        parses_calls = request.prompt.tools and request.tool_choice.mode != "none"
        if parses_calls and self.tool_format is not None:
            calls = TOOL_FORMATS[self.tool_format](self._new_id)
            vocabulary = self._tool_vocabulary
        return TurnParser(
            vocabulary.detokenizer(),
            StopFinder(request.sampling.stop_sequences),
            calls,
            TurnEnd(
                token_ids=frozenset() if request.sampling.ignore_eos else self.end_token_ids,
                after_first_call=not request.tool_choice.parallel,
            ),
        )

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

    def _probe_tools(self) -> "_ToolRendering":
        prompt = Prompt(
            messages=[Message("user", [TextPart("u")])],
            tools=[Tool("probe", {"type": "object", "properties": {}}, "p")],
            system=[TextPart("s")],
        )
        conversation = new_conversation(prompt, self._pieces.controls)
        try:
            placed = place_segments(self._template, conversation, thinking=False)
        except InvalidRequest:
            return _ToolRendering(None, "template")
        tool, system, _ = placed.places
        if "probe" not in placed.text:
            return _ToolRendering(None, "template")
        is_first = tool.end is not None and system.begin is not None and tool.end <= system.begin
        return _ToolRendering(
            find_tool_format(self._template.source), "tools_first" if is_first else "template"
        )

    def _probe_turn_end(self) -> frozenset[TokenId]:
        """The control token right behind an assistant's text."""
        prompt = Prompt([Message(role, [TextPart(role)]) for role in ("user", "assistant", "user")])
        controls = self._pieces.controls
        if controls is None:
            return frozenset()
        conversation = new_conversation(prompt, controls)
        try:
            placed = place_segments(self._template, conversation, thinking=False)
        except InvalidRequest:
            return frozenset()
        end = placed.places[1].end
        match = None if end is None else controls.search(placed.text, end)
        if match is None or match.start() != end:
            return frozenset()
        return frozenset({self._pieces.control_ids[match.group()]})


class _ToolRendering(NamedTuple):
    format: str | None
    order: PrefixOrder
