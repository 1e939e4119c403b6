"""Turns as a chat template writes them, and what is read in them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from engine.protocol import (
    Delta,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    TextDelta,
    TextPart,
    ThinkingDelta,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.text.formats.calls import calls_of
from engine.text.formats.proof import turn_begin
from engine.text.renderer import ChatRenderer
from engine.text.template.messages import new_conversation

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
    base = {"request_id": "r", "scope": "0" * 32, "sampling": Sampling(max_tokens=9)}
    return GenerateRequest(**{**base, "prompt": Prompt([QUESTION], TOOLS), **changes})


def render(model: ChatRenderer, prompt: Prompt, *, thinking: bool = False) -> str:
    conversation = new_conversation(prompt, model._pieces.controls, model.traits)
    return model._template.render(conversation.variables({}, thinking=thinking))


def written(model: ChatRenderer, parts: Sequence[Any], *, thinking: bool = False) -> str:
    """The text of a turn as the template writes it: what its model writes, up to the turn's end."""
    asked = render(model, Prompt([QUESTION], TOOLS), thinking=thinking)
    calls = [part for part in parts if isinstance(part, ToolUsePart)]
    results = [Message("user", [ToolResultPart(call.id, "RESULT") for call in calls])]
    messages = [QUESTION, Message("assistant", list(parts)), *(results if calls else [])]
    answered = render(model, Prompt(messages, TOOLS), thinking=thinking)
    turn = answered[turn_begin(asked, answered) :].partition("RESULT")[0]
    ends = [model.tokenizer.id_to_token(token) or "" for token in model.end_token_ids]
    cuts = [at for end in ends if (at := turn.find(end)) >= 0]
    turn = turn[: min(cuts)] if cuts else turn
    tags = model.formats.tags
    is_open = model._begins_thinking(request(thinking=thinking))
    if tags is not None and is_open and tags.close not in turn:
        turn = tags.close + turn
    return turn


def from_call(model: ChatRenderer, turn: str) -> str:
    """The turn from its first call on, without the thinking that some templates write before it."""
    tags = model.formats.tags
    return (turn.rpartition(tags.close)[2] if tags is not None else turn).lstrip("\n")


def read(model: ChatRenderer, text: str, asked: GenerateRequest, cuts: Sequence[int] = ()) -> Any:
    """The calls, the thinking and the text that a turn's text becomes, cut into pieces."""
    parser = model.formats.new_parser(asked, lambda: "id", is_open=model._begins_thinking(asked))
    borders = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    deltas: list[Delta] = []
    for begin, end in pairwise(borders):
        deltas += parser.feed(text[begin:end])
    deltas += parser.close()
    said = [
        "".join(delta.text for delta in deltas if isinstance(delta, kind))
        for kind in (ThinkingDelta, TextDelta)
    ]
    return calls_of(deltas), *said


def calls(*inputs: dict[str, Any]) -> list[ToolUsePart]:
    names = ["get_weather", "get_time"]
    return [
        ToolUsePart(f"toolu_{'0Ab' * 7}{index:03}", names[index % 2], given)
        for index, given in enumerate(inputs)
    ]
