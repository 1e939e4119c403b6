"""Forced tool calls as the official SDK asks for them, by the real gateway, engine and model."""

from typing import Any

import jsonschema
import pytest
from anthropic import Anthropic, BadRequestError

from tests.e2e.prompts import MODEL

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "kelvin"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA},
    {"name": "never_seen_before", "input_schema": SCHEMA},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is a lease?"}]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "never_seen_before"}),
        ({"type": "tool", "name": "never_seen_before", "disable_parallel_tool_use": True},
         {"never_seen_before"}),
    ],
)  # fmt: skip
def test_a_forced_tool_is_called_with_valid_input(
    client: Anthropic, choice: Any, names: set[str]
) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=QUESTION, tools=TOOLS, tool_choice=choice
    ) as events:
        message = events.get_final_message()
    [block] = message.content
    assert block.type == "tool_use"
    assert block.name in names
    jsonschema.validate(block.input, SCHEMA)
    assert message.stop_reason == "tool_use"
    again = client.messages.create(
        model=MODEL,
        max_tokens=40,
        tools=TOOLS,
        messages=[
            *QUESTION,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny."},
                {"type": "text", "text": "So?"},
            ]},
        ],
    )  # fmt: skip
    assert again.stop_reason in ("end_turn", "tool_use", "max_tokens")


def test_a_tool_that_cannot_be_forced_is_a_bad_request(client: Anthropic) -> None:
    strange = {"name": "strange", "input_schema": {"type": "object", "not": {"required": ["a"]}}}
    with pytest.raises(BadRequestError) as refused:
        client.messages.create(
            model=MODEL,
            max_tokens=20,
            messages=QUESTION,
            tools=[strange],  # type: ignore[list-item]
            tool_choice={"type": "any"},
        )
    assert refused.value.status_code == 400
