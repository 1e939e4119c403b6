"""Output of a schema and forced calls, as both official SDKs ask for them, by the demo model."""

import json
from typing import Any, Literal

import jsonschema
import pytest
from anthropic import Anthropic, BadRequestError
from openai import BadRequestError as TheirBadRequestError
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.prompts import MODEL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "city": {"type": "string", "maxLength": 12},
        "is_cold": {"type": "boolean"},
    },
    "required": ["unit", "city", "is_cold"],
    "additionalProperties": False,
}
QUESTION: list[Any] = [{"role": "user", "content": "What is a lease?"}]
FUNCTION = {"name": "never_seen_before", "parameters": SCHEMA, "strict": True}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": FUNCTION},
]
FORMAT: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
# JSON Schema that no grammar here can hold an output to.
IMPOSSIBLE: dict[str, Any] = {"type": "object", "not": {"required": ["a"]}}


class Weather(BaseModel):
    unit: Literal["celsius", "kelvin"]
    is_cold: bool


def test_an_answer_is_json_of_the_schema_streamed_or_not(client: Anthropic) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "max_tokens": 200, "messages": QUESTION, "output_config": FORMAT
    }  # fmt: skip
    plain = client.messages.create(**request)
    with client.messages.stream(**request) as events:
        live = events.get_final_message()
    for message in (plain, live):
        [block] = message.content
        assert block.type == "text" and message.stop_reason == "end_turn"
        jsonschema.validate(json.loads(block.text), SCHEMA)
        assert list(json.loads(block.text)) == list(SCHEMA["properties"])


def test_the_sdks_own_parsing_gets_its_type(client: Anthropic, openai: OpenAI) -> None:
    parsed = client.messages.parse(
        model=MODEL, max_tokens=200, messages=QUESTION, output_format=Weather
    ).parsed_output
    theirs = openai.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Weather, max_completion_tokens=200
    )
    assert isinstance(parsed, Weather)
    assert isinstance(theirs.choices[0].message.parsed, Weather)


EITHER = {"get_weather", "never_seen_before"}
ONE = {"never_seen_before"}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", EITHER),
        ({"type": "function", "function": {"name": "never_seen_before"}}, ONE),
    ],
)
def test_a_forced_function_has_valid_arguments(
    openai: OpenAI, choice: Any, names: set[str]
) -> None:
    """Streamed where either may be called."""
    request: Any = {
        "model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False, "max_tokens": 200,
    }  # fmt: skip
    if choice == "required":
        with openai.chat.completions.stream(**request) as events:
            answer: Any = events.get_final_completion().choices[0]
    else:
        answer = openai.chat.completions.create(**request).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name in names
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, EITHER), ({"type": "tool", "name": "never_seen_before"}, ONE)],
)
def test_a_forced_tool_is_called_and_its_result_goes_back(
    client: Anthropic, choice: Any, names: set[str]
) -> None:
    request: dict[str, Any] = {
        "model": MODEL, "tools": [{"name": name, "input_schema": SCHEMA} for name in EITHER]
    }  # fmt: skip
    choice = {**choice, "disable_parallel_tool_use": True}
    with client.messages.stream(
        **request, max_tokens=200, messages=QUESTION, tool_choice=choice
    ) as events:
        message = events.get_final_message()
    [block] = message.content
    assert block.type == "tool_use" and block.name in names
    jsonschema.validate(block.input, SCHEMA)
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."}
    messages: list[Any] = [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    again = client.messages.create(**request, max_tokens=40, messages=[*QUESTION, *messages])
    assert again.stop_reason in ("end_turn", "tool_use", "max_tokens")


def test_what_cannot_be_guaranteed_is_refused_in_the_clients_names(
    client: Anthropic, openai: OpenAI
) -> None:
    tool: Any = {"name": "strange", "input_schema": IMPOSSIBLE}
    with pytest.raises(BadRequestError, match=r"tools\.0\.input_schema of `strange`"):
        client.messages.create(
            model=MODEL, max_tokens=9, messages=QUESTION, tools=[tool], tool_choice={"type": "any"}
        )
    impossible: Any = {"format": {"type": "json_schema", "schema": IMPOSSIBLE}}
    with pytest.raises(BadRequestError, match=r"output_config\.format\.schema: can"):
        client.messages.create(
            model=MODEL, max_tokens=9, messages=QUESTION, output_config=impossible
        )
    function: Any = {
        "type": "function", "function": {"name": "strange", "parameters": IMPOSSIBLE}
    }  # fmt: skip
    with pytest.raises(TheirBadRequestError) as refused:
        openai.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[function], tool_choice="required"
        )
    assert refused.value.param == "tools[0].function.parameters"
