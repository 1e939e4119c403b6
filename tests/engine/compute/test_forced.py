"""Forced calls and structured output by the demonstration model: always of their schema."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import jsonschema
import pytest

from engine.backends.base import Parts
from engine.backends.native import load_native
from engine.cache.ids import BlockId
from engine.errors import InvalidRequest
from engine.protocol import (
    Delta,
    FinishReason,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    TextDelta,
    TextPart,
    Tool,
    ToolChoice,
    ToolInputDelta,
    ToolUseStart,
)
from engine.schedule.runner import SampleParams, Work
from engine.settings import Settings

NUM_BLOCKS = 160
MAX_TOKENS = 900
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
WORD = {"type": "string", "maxLength": 12}

SCHEMAS: dict[str, dict[str, Any]] = {
    "no properties": CLOSED,
    "enum": {**CLOSED, "properties": {"unit": {"enum": ["celsius", "kelvin", None, 3]}},
             "required": ["unit"]},
    "const and boolean": {**CLOSED, "required": ["v", "on"],
                          "properties": {"v": {"const": "1"}, "on": {"type": "boolean"}}},
    "integer range": {**CLOSED, "properties": {"n": {"type": "integer", "minimum": -5,
                                                    "maximum": 17}}, "required": ["n"]},
    "number range": {**CLOSED, "properties": {"x": {"type": "number", "exclusiveMinimum": 0,
                                                   "maximum": 1}}, "required": ["x"]},
    "string length": {**CLOSED, "properties": {"s": {"type": "string", "minLength": 2,
                                                    "maxLength": 5}}, "required": ["s"]},
    "pattern": {**CLOSED, "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$",
                                               "maxLength": 9}}, "required": ["id"]},
    "date": {**CLOSED, "properties": {"day": {"type": "string", "format": "date"}},
             "required": ["day"]},
    "nested objects": {**CLOSED, "required": ["place"], "properties": {"place": {
        **CLOSED, "required": ["city", "at"], "properties": {
            "city": WORD, "at": {**CLOSED, "required": ["lat"], "properties": {
                "lat": {"type": "integer", "minimum": -90, "maximum": 90}}}}}}},
    "array of objects": {**CLOSED, "required": ["items"], "properties": {"items": {
        "type": "array", "minItems": 1, "maxItems": 3, "items": {
            **CLOSED, "required": ["k"], "properties": {"k": {"enum": ["a", "b"]}}}}}},
    "array of enums": {**CLOSED, "required": ["tags"], "properties": {"tags": {
        "type": "array", "maxItems": 4, "items": {"enum": ["red", "green"]}}}},
    "tuple": {**CLOSED, "required": ["t"], "properties": {"t": {
        "type": "array", "prefixItems": [{"type": "boolean"}, {"enum": [1, 2]}], "items": False,
        "minItems": 2}}},
    "references": {**CLOSED, "required": ["p"], "properties": {"p": {"$ref": "#/$defs/point"}},
                   "$defs": {"point": {**CLOSED, "required": ["x"], "properties": {
                       "x": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
    "any of": {**CLOSED, "required": ["v"], "properties": {"v": {"anyOf": [
        {"type": "boolean"}, {"type": "null"}, {"enum": ["yes"]}]}}},
    "additional properties of a type": {
        "type": "object", "required": ["a"], "properties": {"a": {"enum": [1]}},
        "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "no type, optional": {"properties": {"city": WORD}, "additionalProperties": False},
    "recursion": {**CLOSED, "required": ["v"], "properties": {
        "v": {"type": "boolean"}, "c": {"type": "array", "maxItems": 1, "items": {"$ref": "#"}}}},
    "keys that need escapes": {**CLOSED, "properties": {'a "b"\n': {"enum": ['\\ "é" 😀']}},
                               "required": ['a "b"\n']},
}  # fmt: skip


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REFUSED: dict[str, dict[str, Any]] = {
    "not": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}},
    "uniqueItems": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    "look-ahead": {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
    "no such type": {"type": "object", "properties": {"a": {"type": "word"}}},
    "no such reference": {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}},
    "no object": {"type": "string"},
    "too deep": _nested(200),
}


class Answer(NamedTuple):
    finish: FinishReason | None
    deltas: list[Delta]

    @property
    def calls(self) -> list[tuple[str, str]]:
        pairs: list[tuple[str, str]] = []
        for delta in self.deltas:
            if isinstance(delta, ToolUseStart):
                pairs.append((delta.name, ""))
            elif isinstance(delta, ToolInputDelta):
                pairs[-1] = (pairs[-1][0], pairs[-1][1] + delta.partial_json)
        return pairs

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas if isinstance(delta, TextDelta))


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    settings = Settings(secret="x" * 16, num_blocks=NUM_BLOCKS)  # type: ignore[arg-type]
    yield load_native(settings, lambda _stage, _fraction: None)


def request(
    tools: list[Tool],
    choice: ToolChoice | None = None,
    schema: dict[str, Any] | None = None,
) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        scope="0" * 32,
        prompt=Prompt([Message("user", [TextPart("What is a lease?")])], tools),
        sampling=Sampling(max_tokens=MAX_TOKENS),
        tool_choice=choice or ToolChoice(),
        output_schema=schema,
    )


def answer(
    parts: Parts, turn_request: GenerateRequest, *, temperature: float, seed: int = 0
) -> Answer:
    """As the engine's loop does it, without a cache."""
    parser = parts.renderer.parser(turn_request)
    tokens = parts.renderer.render(turn_request.prompt, thinking=False, scope="").token_ids
    sample = SampleParams(temperature=temperature, top_p=1, top_k=0, seed=seed)
    table = [BlockId(block) for block in range(NUM_BLOCKS)]
    deltas: list[Delta] = []
    start = 0
    end = len(tokens) + turn_request.sampling.max_tokens
    while parser.finish is None and len(tokens) < end:
        work = Work(
            token_ids=tokens[start:],
            start=start,
            block_table=table,
            sample=sample,
            allowed=parser.allowed,
        )
        start = len(tokens)
        [token] = parts.runner.execute([work])
        assert token is not None
        tokens.append(token)
        deltas += parser.feed(token)
    return Answer(parser.finish, [*deltas, *parser.close()])


# What these allow has no end, and greedy repetition may never find one.
ENDLESS = {"number range", "additional properties of a type"}


@pytest.mark.parametrize("kind", list(SCHEMAS))
def test_a_forced_call_and_an_answer_of_a_schema_validate(parts: Parts, kind: str) -> None:
    schema = SCHEMAS[kind]
    turn_request = request([Tool("made_up", schema)], ToolChoice("tool", "made_up", parallel=False))
    for temperature in (3, 0) if kind not in ENDLESS else (3,):
        reply = answer(parts, turn_request, temperature=temperature)
        assert reply.finish == "tool_use", "the limit was meant to suffice"
        [(name, arguments)] = reply.calls
        assert name == "made_up" and reply.text == ""
        jsonschema.validate(json.loads(arguments), schema)
    reply = answer(parts, request([], schema=schema), temperature=2, seed=5)
    assert reply.finish == "stop"
    jsonschema.validate(json.loads(reply.text), schema)


def test_any_means_one_of_the_tools_and_tool_means_that_one(parts: Parts) -> None:
    tools = [Tool(name, SCHEMAS["enum"]) for name in ("one", "two", 'odd "name" é')]
    reply = answer(parts, request(tools, ToolChoice("any")), temperature=1)
    assert reply.calls and {name for name, _ in reply.calls} <= {tool.name for tool in tools}
    for tool in tools:
        turn_request = request(tools, ToolChoice("tool", tool.name, parallel=False))
        assert [name for name, _ in answer(parts, turn_request, temperature=1).calls] == [tool.name]


def test_tools_beside_a_schema_may_be_called_instead(parts: Parts) -> None:
    tools = [Tool("get_weather", SCHEMAS["nested objects"])]
    for seed in range(4):
        turn_request = request(tools, schema=SCHEMAS["enum"])
        reply = answer(parts, turn_request, temperature=3, seed=seed)
        if reply.calls:
            jsonschema.validate(json.loads(reply.calls[0][1]), SCHEMAS["nested objects"])
        else:
            jsonschema.validate(json.loads(reply.text), SCHEMAS["enum"])


@pytest.mark.parametrize("kind", list(REFUSED))
def test_a_schema_that_cannot_be_guaranteed_names_its_tool(parts: Parts, kind: str) -> None:
    tools = [Tool("good", SCHEMAS["enum"]), Tool("bad_one", REFUSED[kind])]
    for choice in (ToolChoice("any"), ToolChoice("tool", "bad_one")):
        with pytest.raises(InvalidRequest, match="bad_one") as refusal:
            parts.renderer.parser(request(tools, choice))
        assert len(str(refusal.value)) < 300
    parts.renderer.parser(request(tools, ToolChoice("tool", "good")))
    parts.renderer.parser(request(tools))


def test_a_client_cannot_switch_the_librarys_options(parts: Parts) -> None:
    schema = {**REFUSED["not"], "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequest):
        parts.renderer.parser(request([Tool("t", schema)], ToolChoice("any")))
