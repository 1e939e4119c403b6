"""What the engine makes of the calls that a chat template's model writes.

A turn is written as the template writes it, with the tokens that the tokenizer makes of that text:
this is what the model is taken to sample. gpt-oss writes its calls in another way than its template
does, and is taken to write them in its own. The turn goes through the engine's parser, is sent back
as history with its results, and is rendered again.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from engine.errors import InvalidRequest, SchemaRefused
from engine.protocol import (
    Delta,
    Frame,
    GenerateRequest,
    Message,
    Part,
    Prompt,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ThinkingPart,
    Tool,
    ToolChoice,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from engine.text.formats.calls import calls_of
from engine.text.renderer import ChatRenderer
from tests.engine.text.format_cases import control_tokens
from tests.engine.text.template_runs import files_for
from tests.engine.text.written_turns import (
    FORCED,
    QUESTION,
    TOOLS,
    calls,
    from_call,
    request,
    written,
)

KINDS = ["one call", "several", "text and a call", "thinking and a call"]
HEADS = ["template", *KINDS, "at every byte", "forced call", "late system message"]
REPLAY_HEADS = ["template", *KINDS]
YES, NONE = "yes", "–"
THOUGHT, SAID = "I need the tool.", "I look."
INPUT = {"city": 'Bern "x" < y', "count": 3, "flag": True}
OTHER = {"city": "Uri"}
PLAIN_INPUT = {"city": "Bern", "count": 3}
PATTERN = {"type": "object", "properties": {"id": {"type": "string", "pattern": "^a+$"}}}


class Turn(NamedTuple):
    """What a model says in one turn, in the order in which it writes it."""

    name: str
    parts: list[Part]

    @property
    def thinks(self) -> bool:
        return any(isinstance(part, ThinkingPart) for part in self.parts)

    @property
    def content(self) -> list[Any]:
        """What a reader has to find: thinking, text, calls."""
        return [(p.name, p.input) if isinstance(p, ToolUsePart) else _text(p) for p in self.parts]

    @property
    def calls(self) -> list[ToolUsePart]:
        return [part for part in self.parts if isinstance(part, ToolUsePart)]


def _text(part: Part) -> str:
    assert isinstance(part, TextPart | ThinkingPart)
    return part.text


def model_of(template: str) -> ChatRenderer:
    """A tokenizer whose merges cross punctuation, with all control tokens of the template."""
    files = files_for(template)
    files.tokenizer.add_special_tokens(control_tokens(template))
    return ChatRenderer(files)


def turns_of(model: ChatRenderer) -> list[Turn]:
    """A turn of each of `KINDS`, as far as the model writes such."""
    proven = model.formats.calls
    assert proven is not None
    # A template that writes strings without escapes has proven its format with plain ones.
    one, other = calls(INPUT if '"' in str(proven.probe.get("text")) else PLAIN_INPUT, OTHER)
    # A model whose prompts always end inside its thinking has some in every turn.
    always: list[Part] = [ThinkingPart(THOUGHT)] if model._begins_thinking(request()) else []
    found = [Turn(KINDS[0], [*always, one])]
    if not model.formats.is_harmony:
        found.append(Turn(KINDS[1], [*always, one, other]))
    if model.tool_format != "llama3_json":
        found.append(Turn(KINDS[2], [*always, TextPart(SAID), one]))
    if model.reasoning_format is not None:
        found.append(Turn(KINDS[3], [ThinkingPart(THOUGHT), one]))
    return found


def text_of(model: ChatRenderer, turn: Turn) -> str:
    """What the model writes, from the prompt's end on."""
    if model.formats.is_harmony:
        return "".join(map(_harmony, turn.parts)).removesuffix("<|end|><|start|>assistant")
    shown = written(model, turn.parts, thinking=turn.thinks)
    needles = [p.name if isinstance(p, ToolUsePart) else _text(p) for p in turn.parts]
    whole = all(needle in shown for needle in needles)
    if whole and not (model.traits.splits_calls and len(turn.calls) > 1):
        return shown
    return _composed(model, turn)


def _composed(model: ChatRenderer, turn: Turn) -> str:
    """Where the template drops a part, or takes one call a message, as the format writes it."""
    texts: list[str] = []
    opened = model._begins_thinking(request(thinking=turn.thinks))
    tags = model.formats.tags
    for part in turn.parts:
        if isinstance(part, ThinkingPart):
            assert tags is not None
            texts.append(f"{'' if opened else tags.open}\n{part.text}\n{tags.close}\n\n")
        elif isinstance(part, TextPart):
            texts.append(part.text)
    of = model.formats.call_format
    assert of is not None
    separator = of.written[0].separator if model.traits.splits_calls else ""
    if separator:
        each = [from_call(model, written(model, [call])).strip() for call in turn.calls]
        return "".join(texts) + separator.join(each)
    return "".join(texts) + from_call(model, written(model, turn.calls))


def _harmony(part: Part) -> str:
    more = "<|end|><|start|>assistant"
    if isinstance(part, ToolUsePart):
        to = f"<|channel|>commentary to=functions.{part.name} <|constrain|>json<|message|>"
        return to + json.dumps(part.input, ensure_ascii=False)
    channel = "analysis" if isinstance(part, ThinkingPart) else "commentary"
    return f"<|channel|>{channel}<|message|>{_text(part)}{more}"


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """The same text with a token for each byte; control tokens stay."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab()
    encoded = tokenizer.encode(text, add_special_tokens=False)
    found: list[int] = []
    for token, characters in zip(encoded.ids, encoded.tokens, strict=True):
        if token in added:
            found.append(token)
        else:
            # A byte-level vocabulary writes each byte as one character.
            found += [vocabulary[byte] for byte in characters]
    return found


def read(model: ChatRenderer, asked: GenerateRequest, tokens: Sequence[int]) -> list[Part]:
    """The parts of the turn that the engine's parser finds in a model's tokens."""
    parser = model.parser(asked)
    deltas: list[Delta] = []
    for token in [*tokens, *sorted(model.end_token_ids)[:1]]:
        deltas += parser.feed(token)
    deltas += parser.close()
    return list(parts_of(deltas))


def parts_of(deltas: Iterable[Frame]) -> Iterable[Part]:
    deltas = list(deltas)
    for kind, part in ((ThinkingDelta, ThinkingPart), (TextDelta, TextPart)):
        said = "".join(delta.text for delta in deltas if isinstance(delta, kind)).strip()
        if said:
            yield part(said)
    starts = [delta for delta in deltas if isinstance(delta, ToolUseStart)]
    made = calls_of([d for d in deltas if isinstance(d, ToolUseStart | ToolInputDelta)])
    for start, (name, given) in zip(starts, made, strict=True):
        yield ToolUsePart(start.id, name, given)


def replayed(model: ChatRenderer, turn: Turn) -> str:
    """Whether the turn, parsed and sent back, has the tokens that were sampled."""
    asked = request(thinking=turn.thinks)
    before = model.render(asked.prompt, thinking=turn.thinks).token_ids
    sampled = model.tokenizer.encode(text_of(model, turn), add_special_tokens=False).ids
    after = _next_tokens(model, turn, read(model, asked, sampled))
    known = [*before, *sampled]
    if after[: len(known)] == known:
        return YES
    told, expected = (model.tokenizer.decode(t, skip_special_tokens=False) for t in (after, known))
    return "same text, other tokens" if told.startswith(expected) else "other text"


def _next_tokens(model: ChatRenderer, turn: Turn, said: Sequence[Part]) -> list[int]:
    """The prompt of the next turn, which has the calls' results."""
    results: list[Part] = [
        ToolResultPart(part.id, "Rain.") for part in said if isinstance(part, ToolUsePart)
    ]
    messages = [QUESTION, Message("assistant", list(said)), Message("user", results)]
    return model.render(Prompt(messages, TOOLS), thinking=turn.thinks).token_ids


def forced(model: ChatRenderer) -> str:
    """Whether the grammar allows the call as the template writes it, and what it refuses."""
    given = {"city": "Bern it is", "count": 12, "flag": True, "unit": "kelvin"}
    tool = Tool("get_weather", FORCED, "Weather.")
    text = from_call(model, written(model, calls(given)))
    texts = [text, *_by_format(model, "get_weather", given)]
    how = next((i for i, one in enumerate(texts) if _is_forced(model, tool, one, given)), None)
    if how is None:
        return "no"
    found = YES if how == 0 else "yes, not as the template writes it"
    asked = request(
        prompt=Prompt([QUESTION], [Tool("look", PATTERN, "d")]), tool_choice=ToolChoice("any")
    )
    try:
        model.parser(asked)
    except SchemaRefused as error:
        assert "`look`" in str(error)
        return found + "; patterns refused by name"
    return found


def _by_format(model: ChatRenderer, name: str, given: dict[str, Any]) -> list[str]:
    of = model.formats.call_format
    assert of is not None
    fill = {"{name}": name, "{input}": json.dumps(given), "{digits}": "0", "{more}": ""}
    found: list[str] = []
    for way in of.written:
        text = way.begin + way.call + way.end
        for place, value in fill.items():
            text = text.replace(place, value)
        found.append(text)
    return found


def _is_forced(model: ChatRenderer, tool: Tool, text: str, given: dict[str, Any]) -> bool:
    for choice in (ToolChoice("any"), ToolChoice("tool", tool.name, parallel=False)):
        asked = request(prompt=Prompt([QUESTION], [tool]), tool_choice=choice)
        parser = model.parser(asked)
        tags = model.formats.tags
        begin = tags.close if tags is not None and model._begins_thinking(asked) else ""
        deltas: list[Delta] = []
        for token in model.tokenizer.encode(begin + text, add_special_tokens=False).ids:
            if parser.finish is not None:
                break
            if parser.allowed is None or not parser.allowed[token // 8] >> token % 8 & 1:
                return False
            deltas += parser.feed(token)
        if calls_of([*deltas, *parser.close()]) != [(tool.name, given)]:
            return False
    return True


def late_system(model: ChatRenderer) -> str:
    """Where a system message between two turns stands: in its own place, or in the user's turn."""
    first, answer = TextPart("first-question"), TextPart("first-answer")
    told, last = TextPart("Answer in French."), TextPart("last-question")
    messages = [
        Message("user", [first]),
        Message("assistant", [answer]),
        Message("system", [told]),
        Message("user", [last]),
    ]
    try:
        rendered = model.render(Prompt(messages, [], [TextPart("Be brief.")]), thinking=False)
    except InvalidRequest:
        return "refused"
    text = model.tokenizer.decode(rendered.token_ids, skip_special_tokens=False)
    at = [text.rfind(part.text) for part in (first, answer, told, last)]
    if -1 in at:
        return "lost"
    if rendered.folded:
        return "folded"
    return "native" if at == sorted(at) else "moved"


def row(model: ChatRenderer) -> list[str]:
    """The cells of `HEADS` behind the template's name."""
    if model.tool_format is None:
        return [*["no tools"] * 4, NONE, NONE, late_system(model)]
    parsed = dict.fromkeys(KINDS, NONE)
    same: list[bool] = []
    for turn in turns_of(model):
        asked = request(thinking=turn.thinks)
        text = text_of(model, turn)
        whole, bytewise = (
            Turn("", read(model, asked, tokens)).content
            for tokens in (
                model.tokenizer.encode(text, add_special_tokens=False).ids,
                byte_tokens(model.tokenizer, text),
            )
        )
        parsed[turn.name] = YES if whole == turn.content else "no"
        same.append(bytewise == whole)
    everywhere = YES if all(same) else f"{sum(same)} of {len(same)}"
    return [*parsed.values(), everywhere, forced(model), late_system(model)]


def replay_row(model: ChatRenderer) -> list[str]:
    """The cells of `REPLAY_HEADS` behind the template's name."""
    cells = dict.fromkeys(KINDS, NONE)
    cells.update({turn.name: replayed(model, turn) for turn in turns_of(model)})
    return list(cells.values())
