"""Conversations to tokens: the template's own text in one call of the tokenizer, with the segments'
ends.

The whole is rendered without marks and with them (`template/boundaries.py`). What was tokenized
before is remembered piece by piece (`tokens/pieces.py`).
"""

from array import array
from bisect import bisect_right
from contextlib import suppress
from datetime import datetime

from tokenizers import Tokenizer

from engine.errors import InvalidRequest
from engine.protocol import Prompt
from engine.text.rendered import (
    DatedBeginning,
    KnownDays,
    RenderedPrompt,
    SegmentSpan,
    beginning_of,
)
from engine.text.template.boundaries import (
    Place,
    PlacedText,
    in_order,
    message_segments,
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
from engine.text.tokens.pieces import ControlTexts, EncodedText, PieceTokenizer


def render_conversation(
    template: ChatTemplate,
    pieces: PieceTokenizer,
    traits: TemplateTraits,
    prompt: Prompt,
    *,
    thinking: bool,
    scope: str,
    days: KnownDays | None,
) -> RenderedPrompt:
    """See `ChatRenderer.render`."""
    dated: DatedBeginning | None = None
    moment = template.now()
    if template.writes_date and days is not None:
        beginning = beginning_of(prompt, scope)
        dated = DatedBeginning(beginning, days.day_of(beginning))
        moment = datetime.fromisoformat(dated.day)
    with template.at(moment):
        placed, cuts = _place(template, pieces.controls, traits, prompt, thinking=thinking)
    text, messages = placed.text, prompt.messages
    if messages and messages[-1].role == "assistant":
        continued_from = placed.places[-1].end
        if continued_from is None:
            raise InvalidRequest("the chat template can't continue an assistant's message")
        text = text[:continued_from]
    encoded = pieces.encode(text, cuts, scope=scope)
    spans = [
        _span(place, segment.text, encoded)
        for place, segment in zip(placed.places, segments_of(prompt), strict=True)
    ]
    # Those of system messages that are told in the user's turn.
    folded = [
        segment
        for message, segments in zip(messages, message_segments(prompt), strict=True)
        if is_folded(message, prompt, traits)
        for segment in segments
    ]
    return RenderedPrompt(encoded.token_ids(), spans, folded, dated)


def _place(
    template: ChatTemplate,
    controls: ControlTexts,
    traits: TemplateTraits,
    prompt: Prompt,
    *,
    thinking: bool,
) -> tuple[PlacedText, list[int]]:
    """The text without cuts, its segments' places in order, and where the cuts stood."""
    failed: TemplateFails | None = None
    # Templates that fail on a tool are given more of it.
    for completion in range(MAX_COMPLETION + 1 if prompt.tools else 1):
        given = with_complete_tools(prompt, completion)
        conversation = new_conversation(given, controls, traits)
        try:
            placed = place_segments(template, conversation, thinking=thinking)
        except TemplateFails as error:
            failed = failed or error
            continue
        placed, cuts = without_cuts(placed, conversation.cut)
        # The prompt and the template may write a control token's text together: those are cut too,
        # unless the template writes something else then.
        completed = {one for part in strings_of(given) for one in controls.completed_by(part)}
        if completing := {control for control in completed if control in placed.text}:
            conversation = new_conversation(given, controls, traits, completing=completing)
            with suppress(InvalidRequest):
                rendered = template.render(conversation.variables({}, thinking=thinking))
                whole, more = without_cuts(PlacedText(rendered, []), conversation.cut)
                cuts = (more if whole.text == placed.text else []) or cuts
        return PlacedText(placed.text, in_order(given, placed.places)), cuts
    assert failed is not None
    raise failed


def _span(place: Place, text: str | None, encoded: EncodedText) -> SegmentSpan:
    if place.end is None:
        return SegmentSpan(None)
    end, is_exact = _token_end(encoded, place.end)
    placed = None if place.begin is None else encoded.piece_at(place.begin)
    if text is None or place.begin is None or placed is None:
        return SegmentSpan(end, end, is_exact=is_exact)
    # Places are inside the text's outer white space: `begin` is its first other character.
    leading = len(text) - len(text.lstrip())
    begin, ends = place.begin - placed.begin - leading, placed.piece.character_ends
    return SegmentSpan(end, placed.first_token, ends, begin, is_exact)


def _token_end(encoded: EncodedText, character: int) -> tuple[int, bool]:
    """The last edge up to a character: what is behind it changes no token before that edge.

    True unless one more token begins before the character and ends behind it.
    """
    if character == 0:
        return 0, True
    placed = encoded.piece_at(character - 1)
    assert placed is not None
    piece, at = placed.piece, character - placed.begin
    whole = bisect_right(piece.character_ends, at)
    # A piece's end is an edge: behind it comes a control token, or nothing.
    if whole == len(piece):
        return placed.first_token + whole, True
    is_exact = bool(piece.edges[whole]) and (whole == 0 or piece.character_ends[whole - 1] == at)
    while whole > 0 and not piece.edges[whole]:
        whole -= 1
    return placed.first_token + whole, is_exact


def render_text(tokenizer: Tokenizer, text: str) -> RenderedPrompt:
    """Tokens and the one segment, which ends with the prompt.

    Unlike text in a conversation it may contain control tokens: writing them is what raw prompts
    are for. What the tokenizer puts in front of a prompt (a beginning token) it puts here too.
    """
    encoding = tokenizer.encode(text)
    ends = array("I", [end for _, end in encoding.offsets])
    return RenderedPrompt(encoding.ids, [SegmentSpan(len(encoding.ids), 0, ends)])
