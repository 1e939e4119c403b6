"""Growing conversations with tools, as the official SDKs hold them: the usage of every turn.

read(t) = read(t-1) + creation(t-1), through the real gateway, engine and model. What other clients
make of it is in tests/clients.
"""

import json
from typing import Any

import pytest
from anthropic import Anthropic
from google import genai
from google.genai import types
from openai import OpenAI

from scripts.bench.load import marked
from scripts.stack import API_KEY, Stack
from tests.clients.conversation import (
    ABOUT_WEATHER,
    EPHEMERAL,
    MAX_TOKENS,
    QUESTIONS,
    Turn,
    assert_append_only,
)
from tests.e2e.prompts import MODEL, handbook

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = {"name": "get_weather", "description": ABOUT_WEATHER}
TOOL: Any = {**ABOUT, "input_schema": CITY}
FUNCTION: Any = {"type": "function", "function": {**ABOUT, "parameters": CITY}}


@pytest.mark.parametrize("caching", ["automatic", "explicit"])
def test_anthropic(client: Anthropic, caching: str) -> None:
    """Odd turns are streamed. Explicitly marked: the system prompt and the last block."""
    system = marked(handbook(60))
    messages: list[Any] = []
    turns: list[Turn] = []

    def ask() -> Any:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "system": system}
        body |= {"tools": [TOOL], "tool_choice": {"type": "auto"}, "messages": messages}
        if caching == "automatic":
            body["cache_control"] = EPHEMERAL
        else:
            remark(messages)
        if len(turns) % 2:
            with client.messages.stream(**body) as events:
                answer = events.get_final_message()
        else:
            answer = client.messages.create(**body)
        usage = answer.usage
        read_tokens = usage.cache_read_input_tokens
        written_tokens = usage.cache_creation_input_tokens
        assert read_tokens is not None and written_tokens is not None
        turns.append(
            Turn(usage.input_tokens + read_tokens + written_tokens, read_tokens, written_tokens)
        )
        messages.append({"role": "assistant", "content": answer.content})
        return answer

    for question in QUESTIONS:
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        answer = ask()
        calls = [block for block in answer.content if block.type == "tool_use"]
        if calls:
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})
            ask()
    assert_append_only(turns)
    assert len(turns) > len(QUESTIONS), "the model called no tool in any turn"


def remark(messages: list[Any]) -> None:
    """Mark the last block of the last message, and no other."""
    for message in messages:
        if message["role"] == "user":
            for block in message["content"]:
                block.pop("cache_control", None)
    messages[-1]["content"][-1]["cache_control"] = EPHEMERAL


def test_openai(openai: OpenAI) -> None:
    """With `cache_control` parts, odd turns streamed. What was reused unmarked is told apart."""
    messages: list[Any] = [{"role": "system", "content": marked(handbook(60))}]
    turns: list[Turn] = []

    def ask() -> Any:
        for message in messages[1:-1]:
            message.pop("cache_control", None)
        messages[-1]["cache_control"] = EPHEMERAL
        body: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": messages}
        body |= {"tools": [FUNCTION], "tool_choice": "auto"}
        if len(turns) % 2:
            with openai.chat.completions.stream(
                **body, stream_options={"include_usage": True}
            ) as events:
                extension = next(
                    event.chunk.model_extra["holdfast"] for event in events if event.type == "chunk"
                )
                answer: Any = events.get_final_completion()
        else:
            answer = openai.chat.completions.create(**body)
            extension = answer.model_extra["holdfast"]
        usage = answer.usage
        read_tokens = usage.prompt_tokens_details.cached_tokens - extension["automatic_tokens"]
        turns.append(Turn(usage.prompt_tokens, read_tokens, extension["written_tokens"]))
        message = answer.choices[0].message
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        return message

    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        calls = ask().tool_calls or ()
        for call in calls:
            json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        if calls:
            ask()
    assert_append_only(turns)
    assert len(turns) > len(QUESTIONS), "the model called no tool in any turn"


def test_google_interactions(stack: Stack) -> None:
    """As the history of steps, and by `previous_interaction_id`: odd turns go on by the id. What
    the key's policy marks is written and read."""
    options = types.HttpOptions(base_url=stack.gateway, timeout=300_000)
    turns: list[Turn] = []
    steps: list[dict[str, Any]] = []
    previous: Any = None
    tool = {"type": "function", **ABOUT, "parameters": CITY}
    system = handbook(60)
    with genai.Client(api_key=API_KEY, http_options=options) as sdk:

        def ask(new_steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
            """The results of the calls that the answer has."""
            nonlocal previous
            steps.extend(new_steps)
            behind: dict[str, Any] = {"input": steps}
            if len(turns) % 2:
                behind = {"input": new_steps, "previous_interaction_id": previous}
            create: Any = sdk.interactions.create
            interaction = create(
                model=MODEL,
                system_instruction=system,
                tools=[tool],
                generation_config={"max_output_tokens": MAX_TOKENS},
                **behind,
            )
            previous = interaction.id
            usage = interaction.usage
            extension = interaction.model_extra["holdfast"]
            read_tokens = usage.total_cached_tokens
            turns.append(Turn(usage.total_input_tokens, read_tokens, extension["written_tokens"]))
            steps.extend(step.model_dump(exclude_none=True) for step in interaction.steps)
            return [
                {"type": "function_result", "call_id": step.id, "result": "sunny"}
                for step in interaction.steps
                if step.type == "function_call"
            ]

        for question in QUESTIONS:
            content = {"type": "text", "text": question}
            results = ask([{"type": "user_input", "content": [content]}])
            if results:
                ask(results)
    assert_append_only(turns)
    assert len(turns) > len(QUESTIONS), "the model called no tool in any turn"
