"""Turns prompts into tokens and tokens into deltas, by one model's template and tokenizer."""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain, product
from typing import Literal

from tokenizers import Tokenizer

from engine.cache.ids import TokenId
from engine.errors import FieldRefused, InvalidRequest
from engine.protocol import (
    IMAGE_REFERENCE,
    Delta,
    FinishReason,
    GenerateRequest,
    Prompt,
    TextDelta,
    ThinkingPart,
    ToolInputDelta,
    ToolResultPart,
    ToolUseStart,
)
from engine.schedule.output import Spelled
from engine.text.call_styles import find_call_style
from engine.text.files import PromptFiles, read_prompt_files
from engine.text.formats.calls import FormatParser
from engine.text.formats.matching import StopFinder, StopStrings
from engine.text.formats.proof import FormatChoice, ModelFormats, TemplateProbe, find_formats
from engine.text.grammar import CallStyle, Constraint, GrammarWriter, ThinkingRule
from engine.text.rendered import (
    DatedBeginning,
    KnownDays,
    RenderedPrompt,
    SegmentSpan,
    TemplateRefused,
    beginning_of,
)
from engine.text.template.boundaries import (
    Place,
    PlacedText,
    TemplateSegment,
    place_segments,
    segments_of,
    without_cuts,
)
from engine.text.template.chat_template import ChatTemplate, TemplateFails
from engine.text.template.messages import (
    MAX_COMPLETION,
    TemplateTraits,
    is_folded,
    new_conversation,
    strings_of,
    with_complete_tools,
)
from engine.text.tokens.detokenize import Detokenizer, Vocabulary
from engine.text.tokens.pieces import EncodedText, PieceTokenizer
from engine.text.warning import warn


def _token_end(encoded: EncodedText, character: int) -> tuple[int, bool]:
    """The tokens up to the last edge at or before a character, and whether they end exactly there.

    An edge is a place between two tokens. No later text changes the tokens before it.
    """
    if character == 0:
        return 0, True
    placed = encoded.piece_at(character - 1)
    assert placed is not None
    piece = placed.piece
    at = character - placed.begin
    num_whole = bisect_right(piece.character_ends, at)
    # A piece's end is an edge, because a control token or nothing follows it.
    if num_whole == len(piece):
        return placed.first_token + num_whole, True
    ends_here = num_whole == 0 or piece.character_ends[num_whole - 1] == at
    is_exact = bool(piece.edges[num_whole]) and ends_here
    while num_whole > 0 and not piece.edges[num_whole]:
        num_whole -= 1
    return placed.first_token + num_whole, is_exact


def _token_mask(token_ids: Collection[int], tokenizer: Tokenizer) -> bytes | None:
    """A bit for each token id, lowest first, 1 for these ids; None if there are none.

    Raises FieldRefused if the vocabulary has none of them.
    """
    if not token_ids:
        return None
    vocabulary_size = tokenizer.get_vocab_size(with_added_tokens=True)
    known = [token for token in token_ids if token < vocabulary_size]
    if not known:
        raise FieldRefused("allowed_token_ids", "none is in the vocabulary of this model")
    mask = bytearray(max(known) // 8 + 1)
    for token in known:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)


class TurnParser:
    """An `engine.schedule.output.OutputParser`.

    Stop strings are found in the model's text before any format is parsed, so no delta has one.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopFinder,
        calls: FormatParser,
        end_token_ids: frozenset[TokenId],
        constraint: Constraint | None = None,
        *,
        ends_after_call: bool = False,
        forces_call: bool = False,
        token_mask: bytes | None = None,
    ) -> None:
        """A `constraint` says which tokens may come, and ends the turn when it is complete.

        Without one, `token_mask` says which tokens may come in the whole turn. With
        `ends_after_call` the first call ends the turn. With `forces_call` a call that is cut off
        before its name leaves no text behind.
        """
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        # The number of tokens from the opening tag of thinking to the closing tag, both included.
        self.thinking_tokens = 0
        self._detokenizer = detokenizer
        self._stops = stops
        self._calls = calls
        self.end_token_ids = end_token_ids
        self._ends_after_call = ends_after_call
        self._constraint = constraint
        self._forces_call = forces_call
        self._token_mask = token_mask
        self._is_cut = False

    @property
    def grammar(self) -> str | None:
        """The constraint as text, for a program that samples by itself. None: no constraint."""
        return None if self._constraint is None else self._constraint.grammar

    @property
    def allowed(self) -> bytes | None:
        return self._token_mask if self._constraint is None else self._constraint.allowed

    @property
    def constraint(self) -> Constraint | None:
        return self._constraint

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        if self.finish is not None:
            return []
        was_thinking = self._calls.is_thinking
        if token_id in self.end_token_ids:
            self.thinking_tokens += was_thinking
            # Calls are closed before they are counted, because a call may be whole without its end
            # tag.
            deltas = self._close(is_cut=False)
            if self.finish is None:
                self.finish = self._natural_end()
            return deltas
        deltas = self._take(self._detokenizer.feed(token_id))
        self.thinking_tokens += was_thinking or self._calls.is_thinking
        if self._constraint is not None:
            self._constraint.take(token_id)
            if self.finish is None and self._constraint.is_failed:
                self.finish = "too_costly"
            elif self.finish is None and self._constraint.is_complete:
                self.finish = self._natural_end()
        return deltas

    def close(self) -> Sequence[Delta]:
        return self._close(is_cut=self.finish in (None, "stop_sequence", "too_costly"))

    def _close(self, *, is_cut: bool) -> list[Delta]:
        """The last deltas. `is_cut` says that the model did not end the turn by itself, so a call
        may be cut off before its name."""
        deltas: list[Delta] = []
        if self.finish is None:
            deltas += self._take(self._detokenizer.flush())
        if self._is_cut:
            return deltas
        if self.finish is None:
            deltas += self._calls.feed(self._stops.flush())
        deltas += self._calls.close(is_cut=is_cut)
        if is_cut and self._forces_call:
            deltas = [delta for delta in deltas if not isinstance(delta, TextDelta)]
        return self._cut(deltas)

    def _natural_end(self) -> FinishReason:
        return "tool_use" if self._calls.num_calls else "stop"

    def _take(self, text: str) -> list[Delta]:
        deltas = self._calls.feed(self._stops.feed(text)) if text else []
        if self._ends_after_call and self._calls.num_calls:
            self.finish = "tool_use"
            deltas = self._cut(deltas)
            self._is_cut = True
        elif self._stops.found is not None:
            self.finish = "stop_sequence"
            self.stop_sequence = self._stops.found
        return deltas

    def _cut(self, deltas: list[Delta]) -> list[Delta]:
        """The deltas up to the first call's end, or all if calls may be parallel."""
        if not self._ends_after_call or not self._calls.num_calls:
            return deltas
        first_deltas = list[Delta]()
        has_call = False
        for delta in deltas:
            is_call = isinstance(delta, ToolUseStart | ToolInputDelta)
            if has_call and (not is_call or isinstance(delta, ToolUseStart)):
                break
            has_call = has_call or is_call
            first_deltas.append(delta)
        return first_deltas


PrefixOrder = Literal["tools_first", "template"]


def _opens_thinking(
    probe: TemplateProbe, formats: ModelFormats, traits: TemplateTraits
) -> dict[tuple[bool, bool], bool]:
    """Whether a prompt ends inside the tags of thinking.

    The keys are pairs: whether the model is to think, and whether a tool result is last.
    """
    opens: dict[tuple[bool, bool], bool] = {}
    for thinking, after_result in product((False, True), repeat=2):
        opens[thinking, after_result] = formats.tags is not None and probe.opens_tag(
            formats.tags, traits, thinking=thinking, after_result=after_result
        )
    return opens


def _within(controls: Iterable[str], markers: Collection[str]) -> set[str]:
    """The control tokens' texts that are a part of a marker. A marker may have several tokens."""
    return {text for text in controls if any(text in marker for marker in markers)}


def _span(encoded: EncodedText, place: Place, segment: TemplateSegment) -> SegmentSpan:
    """The place of a segment in the tokens, by its place in the text."""
    if place.end is None:
        return SegmentSpan(None)
    end, is_exact = _token_end(encoded, place.end)
    piece = None if place.begin is None else encoded.piece_at(place.begin)
    if segment.text is None or place.begin is None or piece is None:
        return SegmentSpan(end, end, is_exact=is_exact)
    # `place.begin` is the text's first character that is not white space.
    leading = len(segment.text) - len(segment.text.lstrip())
    begin = place.begin - piece.begin - leading
    return SegmentSpan(end, piece.first_token, piece.piece.character_ends, begin, is_exact)


def _place_images(
    encoded: EncodedText,
    places: Sequence[Place],
    segments: Sequence[TemplateSegment],
    image_ids: Collection[str],
    spans: list[SegmentSpan],
) -> list[str]:
    """The ids of a prompt's images in the order of the text.

    The items of `spans` that have images lose their `character_ends`. Raises InvalidRequest if the
    template does not tell where an image stands.
    """
    placed_ids: list[tuple[int, list[str]]] = []
    for number, (place, segment) in enumerate(zip(places, segments, strict=True)):
        references = IMAGE_REFERENCE.findall(segment.text or "")
        ids = [reference for reference in references if reference in image_ids]
        if not ids:
            continue
        if place.begin is None:
            raise InvalidRequest("the chat template does not tell where an image stands")
        placed_ids.append((place.begin, ids))
        # The rendered characters differ from the client's, so no place inside the text is known.
        first, _ = _token_end(encoded, place.begin)
        spans[number] = replace(spans[number], first_token=first, character_ends=())
    return list(chain.from_iterable(ids for _, ids in sorted(placed_ids)))


class ChatRenderer:
    """Renders, tokenizes and parses for one model. One thread at a time may use it."""

    def __init__(
        self,
        files: PromptFiles,
        *,
        formats: FormatChoice | None = None,
        now: Callable[[], datetime] = datetime.now,
        image_text: str = "",
    ) -> None:
        """Raises TemplateRefused if the settings want tools and the template can't render them."""
        # The text that stands for an image in a prompt; empty: the model reads no images.
        self.image_text = image_text
        self.template = ChatTemplate(files.templates, files.special_tokens, now)
        self.tokenizer = files.tokenizer
        self._pieces = PieceTokenizer(
            files.tokenizer,
            template=self.template.source,
            end_token_ids=files.end_token_ids,
        )
        probe = TemplateProbe(self.template, self._pieces.controls)
        controls = self._pieces.control_ids
        declared = {text for text, token in controls.items() if token in files.end_token_ids}
        self.formats = find_formats(probe, formats or FormatChoice(), declared)
        # None: no known format fits the template. The same holds for `reasoning_format`.
        self.tool_format = self.formats.tool_format
        self.traits = probe.find_text_input(probe.find_traits(self.formats.traits))
        if self.tool_format is not None and not probe.shows_tools(self.traits):
            if self.formats.calls is None or (formats is not None and formats.tools != "auto"):
                raise TemplateRefused("`tool_format`: the chat template does not render tools")
            # A template that renders calls but no tools gets the tools in the system prompt.
            instructed = replace(self.traits, call_instructions=self.formats.call_instructions)
            shows_tools = probe.shows_tools(instructed)
            self.traits = instructed if shows_tools else self.traits
            self.tool_format = self.tool_format if shows_tools else None
        self.reasoning_format = self.formats.reasoning_format
        # Whether the tools come before the system prompt, found by a render.
        self.prefix_order: PrefixOrder = "template"
        if probe.has_tools_first(self.traits):
            self.prefix_order = "tools_first"
        ends = {controls[text] for text in self.formats.ends if text in controls}
        no_ends = {controls[text] for text in self.formats.no_ends if text in controls}
        shown_ends = probe.find_turn_end(self.traits)
        # The tokens that end a turn: the tokens that the model declares, and the token that its
        # template writes.
        self.end_token_ids = frozenset((files.end_token_ids | shown_ends | ends) - no_ends)
        self._opens_thinking = _opens_thinking(probe, self.formats, self.traits)
        texts = files.tokenizer.get_added_tokens_decoder().values()
        control_texts = {token.content for token in texts if len(token.content) > 1}
        vocabulary = Vocabulary(files.tokenizer)
        thinking_markers = self.formats.thinking_markers
        self._vocabulary = vocabulary.with_text(_within(control_texts, thinking_markers))
        self._tool_vocabulary = vocabulary.with_text(_within(control_texts, self.formats.markers))
        self._writer: GrammarWriter | None = None
        self._style: CallStyle | None = None
        try:
            self._writer = GrammarWriter(self.tokenizer, self.end_token_ids)
            self._style = find_call_style(self.formats, self._writer)
        except ValueError as error:
            warn("no forced tools: the grammar library refuses the tokenizer", why=str(error))

    @property
    def can_constrain(self) -> bool:
        """Whether the grammar library can use the tokenizer."""
        return self._writer is not None

    @classmethod
    def from_model(
        cls,
        model: str,
        formats: FormatChoice | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> "ChatRenderer":
        """The renderer of a Hugging Face directory or hub id. Raises TemplateRefused."""
        return cls(read_prompt_files(model), formats=formats, now=now)

    @property
    def writes_date(self) -> bool:
        """Whether the template writes the date (`strftime_now`)."""
        return self.template.writes_date

    def render(
        self, prompt: Prompt, *, thinking: bool, scope: str = "", days: KnownDays | None = None
    ) -> RenderedPrompt:
        """The prompt's tokens and segments. Raises InvalidRequest if the template refuses it.

        If the last message is an assistant's, the tokens end right behind it, to be continued.
        `scope` separates tenants in the cache of tokenized texts. With `days` a template that
        writes the date writes the day of the prompt's beginning.
        """
        if prompt.text is not None:
            # Unlike the text of a conversation, a raw prompt may have control tokens. The tokenizer
            # adds its usual first tokens.
            encoding = self.tokenizer.encode(prompt.text)
            ends = array("I", [end for _, end in encoding.offsets])
            return RenderedPrompt(encoding.ids, [SegmentSpan(len(encoding.ids), 0, ends)])
        dated: DatedBeginning | None = None
        moment = self.template.now()
        if self.writes_date and days is not None:
            beginning = beginning_of(prompt, scope)
            dated = DatedBeginning(beginning, days.day_of(beginning))
            moment = datetime.fromisoformat(dated.day)
        with self.template.at(moment):
            placed, cuts = self._place(prompt, thinking=thinking)
        text = placed.text
        messages = prompt.messages
        if messages and messages[-1].role == "assistant":
            continued_from = placed.places[-1].end
            if continued_from is None:
                raise InvalidRequest("the chat template can't continue an assistant's message")
            text = text[:continued_from]
        encoded = self._pieces.encode(text, cuts, scope=scope)
        segments = segments_of(prompt)
        spans = [
            _span(encoded, place, segment)
            for place, segment in zip(placed.places, segments, strict=True)
        ]
        images: list[str] = []
        if prompt.images and self.image_text:
            image_ids = {image.id for image in prompt.images}
            images = _place_images(encoded, placed.places, segments, image_ids, spans)
        # The segments of system messages whose text a user's turn has.
        folded = [
            number
            for number, segment in enumerate(segments)
            if segment.message and is_folded(segment.message, prompt, self.traits)
        ]
        return RenderedPrompt(encoded.token_ids(), spans, folded, dated, images)

    def _place(self, prompt: Prompt, *, thinking: bool) -> tuple[PlacedText, list[int]]:
        """The rendered text without cuts, its segments' places in order, and where the cuts were.

        The prompt is rendered twice, without marks and with them (`template/boundaries.py`).
        """
        failed: TemplateFails | None = None
        template = self.template
        controls = self._pieces.controls
        # If a template fails on an incomplete tool, it gets a more complete one.
        for completion in range(MAX_COMPLETION + 1 if prompt.tools else 1):
            completed_prompt = with_complete_tools(prompt, completion)
            conversation = new_conversation(
                completed_prompt, controls, self.traits, image_text=self.image_text
            )
            try:
                placed = place_segments(template, conversation, thinking=thinking)
            except TemplateFails as error:
                failed = failed or error
                continue
            placed, cuts = without_cuts(placed, conversation.cut)
            # The prompt and the template may write a control token's text together. Such texts are
            # cut too, unless that changes the template's text.
            texts = strings_of(completed_prompt)
            completed = frozenset[str]().union(*map(controls.completed_by, texts))
            completing = frozenset(control for control in completed if control in placed.text)
            if completing:
                conversation = new_conversation(
                    completed_prompt,
                    controls,
                    self.traits,
                    completing=completing,
                    image_text=self.image_text,
                )
                with suppress(InvalidRequest):
                    rendered = template.render(conversation.variables({}, thinking=thinking))
                    whole, more = without_cuts(PlacedText(rendered, []), conversation.cut)
                    cuts = (more if whole.text == placed.text else []) or cuts
            return placed, cuts
        assert failed is not None
        raise failed

    @property
    def can_trigger(self) -> bool:
        """Whether calls among free text can be constrained to their schemas."""
        return self.can_constrain and self._style is not None and bool(self._style.starts)

    def spelled(self, token_id: TokenId) -> Spelled:
        """The text of a token. The markers of calls and of thinking count as text."""
        return self._tool_vocabulary.spelled(token_id)

    def parser(self, request: GenerateRequest) -> TurnParser:
        """A parser for the request's first choice. Raises like `parsers`."""
        return self.parsers(request)[0]

    def parsers(self, request: GenerateRequest) -> Sequence[TurnParser]:
        """A parser for each choice. The request's grammar is compiled once for all of them.

        Raises InvalidRequest if a demand on the output can't be guaranteed.
        """
        sampling = request.sampling
        choice = request.tool_choice
        messages = request.prompt.messages
        continues = request.prompt.text is not None
        continues = continues or (bool(messages) and messages[-1].role == "assistant")
        tags = self.formats.tags
        is_open = self.begins_thinking(request)
        may_think = tags is not None and (is_open or request.thinking or request.constrains_calls)
        rule = ThinkingRule(tags, is_open) if tags is not None and may_think else None
        constraints: list[Constraint | None] = [None] * sampling.num_choices
        if self._writer is not None:
            constraint = self._writer.constraint(request, self._style, rule)
            for index in range(sampling.num_choices):
                constraints[index] = constraint.copy() if constraint and index else constraint
        stops = StopStrings(sampling.stop_sequences)
        ends = frozenset(map(TokenId, sampling.stop_token_ids))
        ends |= frozenset() if sampling.ignore_eos else self.end_token_ids
        token_mask = _token_mask(sampling.allowed_token_ids, self.tokenizer)
        has_tools = bool(request.prompt.callable_tools) and choice.mode != "none"
        vocabulary = self._tool_vocabulary if has_tools else self._vocabulary
        return [
            TurnParser(
                vocabulary.detokenizer(continues=continues),
                StopFinder(stops),
                self.formats.new_parser(request, is_open=is_open),
                ends,
                constraint,
                ends_after_call=not choice.parallel,
                forces_call=choice.mode in ("any", "tool"),
                token_mask=token_mask,
            )
            for constraint in constraints
        ]

    def begins_thinking(self, request: GenerateRequest) -> bool:
        """Whether the prompt ends inside a thinking tag."""
        if request.prompt.text is not None:
            return False
        last = request.prompt.messages[-1] if request.prompt.messages else None
        if last is not None and last.role == "assistant":
            ends_thinking = bool(last.parts) and isinstance(last.parts[-1], ThinkingPart)
            return self.formats.tags is not None and ends_thinking
        after_result = last is not None and any(isinstance(p, ToolResultPart) for p in last.parts)
        return self._opens_thinking[request.thinking, after_result]
