"""Output of a schema and forced calls, as both official SDKs ask for them, by the demo model."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from anthropic import Anthropic, BadRequestError
from openai import OpenAI
from pydantic import BaseModel

from scripts.stack import API_KEY, Stack
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
RESPONSE_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}
# JSON Schema that no grammar here can hold an output to.
IMPOSSIBLE: dict[str, Any] = {"type": "object", "not": {"required": ["a"]}}


class Weather(BaseModel):
    unit: Literal["celsius", "kelvin"]
    is_cold: bool


@pytest.fixture
def chat(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{stack.gateway}/v1", api_key=API_KEY, timeout=120, max_retries=0
    ) as client:
        yield client


def test_an_answer_is_json_of_the_schema_streamed_or_not(client: Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "max_tokens": 200, "messages": QUESTION, "output_config": FORMAT
    }  # fmt: skip
    plain = client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        live = events.get_final_message()
    for message in (plain, live):
        [block] = message.content
        assert block.type == "text" and message.stop_reason == "end_turn"
        jsonschema.validate(json.loads(block.text), SCHEMA)
        assert list(json.loads(block.text)) == list(SCHEMA["properties"])


def test_the_sdks_own_parsing_gets_its_type(client: Anthropic, chat: OpenAI) -> None:
    parsed = client.messages.parse(
        model=MODEL, max_tokens=200, messages=QUESTION, output_format=Weather
    ).parsed_output
    theirs = chat.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Weather, max_completion_tokens=200
    )
    assert isinstance(parsed, Weather)
    assert isinstance(theirs.choices[0].message.parsed, Weather)


def test_an_openai_answer_is_json_of_the_schema(chat: OpenAI) -> None:
    asked: Any = {
        "model": MODEL, "messages": QUESTION, "max_tokens": 200, "response_format": RESPONSE_FORMAT
    }  # fmt: skip
    plain = chat.chat.completions.create(**asked).choices[0]
    chunks = chat.chat.completions.create(**asked, stream=True)
    live = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert plain.finish_reason == "stop"
    for text in (plain.message.content, live):
        jsonschema.validate(json.loads(text or ""), SCHEMA)


def test_an_object_without_a_schema_is_one_until_the_limit(chat: OpenAI) -> None:
    answer = chat.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=60, response_format={"type": "json_object"}
    ).choices[0]
    text = answer.message.content or ""
    assert text.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "never_seen_before"}),
        ({"type": "function", "function": {"name": "never_seen_before"}}, {"never_seen_before"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])
def test_a_forced_function_is_called_with_valid_arguments(
    chat: OpenAI, choice: Any, names: set[str], stream: bool
) -> None:
    asked: Any = {
        "model": MODEL, "messages": QUESTION, "tools": TOOLS, "tool_choice": choice,
        "parallel_tool_calls": False, "max_tokens": 200,
    }  # fmt: skip
    if stream:
        with chat.chat.completions.stream(**asked) as events:
            for _ in events:
                pass
            answer: Any = events.get_final_completion().choices[0]
    else:
        answer = chat.chat.completions.create(**asked).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name in names
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert answer.finish_reason == "tool_calls"


def test_what_cannot_be_guaranteed_is_refused_in_the_clients_own_names(
    client: Anthropic, chat: OpenAI
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
    with pytest.raises(openai.BadRequestError) as refused:
        chat.chat.completions.create(
            model=MODEL, messages=QUESTION, tools=[function], tool_choice="required"
        )
    assert refused.value.param == "tools[0].function.parameters"
