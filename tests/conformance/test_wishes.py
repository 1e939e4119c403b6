"""Strict tools that the model may call or not, and a last message that it continues."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
from tokenizers import Tokenizer

import engine as package
from engine.protocol import (
    Message,
    TextPart,
    Tool,
    ToolChoice,
)
from tests.conformance.engines import Answer, Engine
from tests.conformance.test_demands import SCHEMA, answer, calls, demand, need, with_tools

MODEL = Path(str(package.__file__)).parent / "holdfast-demo"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
CALL = TOKENIZER.token_to_id("<tool_call>")
STRICT = Tool("get_weather", SCHEMA, "The weather.", strict=True)
UNHELD = Tool("odd", {"type": "object", "properties": {"a": {"not": {}}}}, strict=True)


def ask(engine: Engine, tools: list[Tool], **sampling: Any) -> Answer:
    request = with_tools(engine, ToolChoice(parallel=False), tools)
    changed = msgspec.structs.replace(request.sampling, **sampling)
    return answer(engine, msgspec.structs.replace(request, sampling=changed))


def test_a_strict_tool_is_called_by_its_schema_once_the_model_begins_a_call(engine: Engine) -> None:
    need(engine, "strict_tools")
    need(engine, "penalties")
    for seed in range(3):
        reply = ask(engine, [STRICT], temperature=2.0, seed=seed, logit_bias={CALL: 100.0})
        [(name, arguments)] = calls(reply)
        assert name == "get_weather"
        jsonschema.validate(json.loads(arguments), SCHEMA)
        assert reply.started.unheld == []


def test_with_a_strict_tool_a_turn_may_still_be_text(engine: Engine) -> None:
    need(engine, "strict_tools")
    need(engine, "penalties")
    reply = ask(engine, [STRICT], temperature=0.0, logit_bias={CALL: -100.0})
    assert calls(reply) == [] and reply.text()


def test_a_strict_tool_that_no_grammar_holds_is_told_and_no_error(engine: Engine) -> None:
    need(engine, "strict_tools")
    reply = ask(engine, [STRICT, UNHELD], temperature=0.0)
    assert [unheld.tool for unheld in reply.started.unheld] == ["odd"]
    assert reply.finished


def test_a_named_tool_takes_no_room_in_the_prompt_and_may_be_forced(engine: Engine) -> None:
    need(engine, "forced_tools")
    request = with_tools(engine, ToolChoice("tool", "later", parallel=False), [STRICT])
    later = Tool("later", SCHEMA, "Comes later. " * 50)
    named = msgspec.structs.replace(request.prompt, named_tools=[later])
    assert engine.count(named).input_tokens == engine.count(request.prompt).input_tokens
    reply = answer(engine, msgspec.structs.replace(request, prompt=named))
    [(name, arguments)] = calls(reply)
    assert name == "later"
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_an_assistant_message_at_the_end_is_continued(engine: Engine) -> None:
    need(engine, "own_template")
    request = demand(engine)
    messages = [*request.prompt.messages, Message("assistant", [TextPart("A lease is a")])]
    prompt = msgspec.structs.replace(request.prompt, messages=messages)
    reply = answer(engine, msgspec.structs.replace(request, prompt=prompt))
    assert reply.finished and not reply.text().startswith("A lease is a")
