"""Turns as a chat template writes them, and what is read in them."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

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
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from engine.schedule.output import OutputParser
from engine.text.formats.calls import calls_of
from engine.text.formats.proof import turn_begin
from engine.text.renderer import ChatRenderer
from engine.text.template.messages import new_conversation
from tests.engine.backends import local

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a"},
        "count": {"type": "integer", "description": "b"},
        "deep": {"type": "object", "properties": {"k": {"type": "string"}}, "description": "c"},
        "flag": {"type": "boolean", "description": "d"},
        "list": {"type": "array", "items": {"type": "string"}, "description": "e"},
        "note": {"type": "string", "description": "f"},
    },
    "required": ["city"],
}
FORCED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "count"],
    "additionalProperties": False,
}
TOOLS = [Tool("get_weather", SCHEMA, "Weather."), Tool("get_time", SCHEMA, "The time.")]
QUESTION = Message("user", [TextPart("What is it like?")])


def request(**changes: Any) -> GenerateRequest:
    return local.request(changes.pop("prompt", Prompt([QUESTION], TOOLS)), **changes)


def render(model: ChatRenderer, prompt: Prompt, *, thinking: bool = False) -> str:
    conversation = new_conversation(prompt, model._pieces.controls, model.traits)
    return model.template.render(conversation.variables({}, thinking=thinking))


def written(model: ChatRenderer, parts: Sequence[Any], *, thinking: bool = False) -> str:
    """The text of a turn as the template writes it: what its model writes, up to the turn's end."""
    before = render(model, Prompt([QUESTION], TOOLS), thinking=thinking)
    calls = [part for part in parts if isinstance(part, ToolUsePart)]
    results = [Message("user", [ToolResultPart(call.id, "RESULT") for call in calls])]
    messages = [QUESTION, Message("assistant", list(parts)), *(results if calls else [])]
    answered = render(model, Prompt(messages, TOOLS), thinking=thinking)
    turn = answered[turn_begin(before, answered) :].partition("RESULT")[0]
    ends = [model.tokenizer.id_to_token(token) or "" for token in model.end_token_ids]
    cuts = [at for end in ends if (at := turn.find(end)) >= 0]
    turn = turn[: min(cuts)] if cuts else turn
    tags = model.formats.tags
    is_open = model.begins_thinking(request(thinking=thinking))
    if tags is not None and is_open and tags.close not in turn:
        turn = tags.close + turn
    return turn


def from_call(model: ChatRenderer, turn: str) -> str:
    """The turn from its first call on, without the thinking that some templates write before it."""
    tags = model.formats.tags
    return (turn.rpartition(tags.close)[2] if tags is not None else turn).lstrip("\n")


def read(model: ChatRenderer, text: str, request: GenerateRequest, cuts: Sequence[int] = ()) -> Any:
    """The calls, the thinking and the text that a turn's text becomes, cut into pieces."""
    parser = model.formats.new_parser(request, is_open=model.begins_thinking(request))
    borders = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    deltas: list[Delta] = []
    for begin, end in pairwise(borders):
        deltas += parser.feed(text[begin:end])
    deltas += parser.close()
    texts = [
        "".join(delta.text for delta in deltas if isinstance(delta, kind))
        for kind in (ThinkingDelta, TextDelta)
    ]
    return calls_of(deltas), *texts


def calls(*inputs: dict[str, Any]) -> list[ToolUsePart]:
    names = ["get_weather", "get_time"]
    return [
        ToolUsePart(f"toolu_{'0Ab' * 7}{index:03}", names[index % 2], arguments)
        for index, arguments in enumerate(inputs)
    ]


def parts_of(deltas: Iterable[Frame]) -> list[Part]:
    """The parts of a turn that its deltas make: thinking, text, calls."""
    deltas = list(deltas)
    parts: list[Part] = []
    for kind, part in ((ThinkingDelta, ThinkingPart), (TextDelta, TextPart)):
        text = "".join(delta.text for delta in deltas if isinstance(delta, kind)).strip()
        parts += [part(text)] if text else []
    starts = [delta for delta in deltas if isinstance(delta, ToolUseStart)]
    calls = calls_of([d for d in deltas if isinstance(d, ToolUseStart | ToolInputDelta)])
    for start, (name, arguments) in zip(starts, calls, strict=True):
        parts.append(ToolUsePart(start.id, name, arguments))
    return parts


def thinking_end(model: ChatRenderer, request: GenerateRequest) -> str:
    """What a turn has to begin with where the prompt ends inside of thinking."""
    tags = model.formats.tags
    return tags.close if tags is not None and model.begins_thinking(request) else ""


def tokens_of(model: ChatRenderer, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def follow(parser: OutputParser, model: ChatRenderer, text: str) -> tuple[str, list[Delta]]:
    """Feed a text's tokens up to the first that is not allowed: what was fed, and its deltas."""
    fed: list[int] = []
    deltas: list[Delta] = []
    for token in tokens_of(model, text):
        if parser.finish is not None:
            break
        assert parser.allowed is not None
        if not parser.allowed[token // 8] >> token % 8 & 1:
            break
        fed.append(token)
        deltas += parser.feed(token)
    return model.tokenizer.decode(fed, skip_special_tokens=False), deltas
