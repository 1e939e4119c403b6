"""OpenAI's SDK and what it sends back, with the demo model: searches for tools, custom tools, turns
that generate nothing."""

from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.prompts import MODEL, handbook

HI: dict[str, Any] = {"role": "user", "content": "What is a lease?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SEARCH: dict[str, Any] = {"type": "tool_search", "execution": "client", "parameters": CITY}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather.",
    "parameters": CITY,
    "defer_loading": True,
}
BODY: dict[str, Any] = {"model": MODEL, "store": False, "max_output_tokens": 200}


def test_a_search_of_the_clients_own_leads_to_a_call(openai: OpenAI) -> None:
    """Each turn's prompt begins with the whole one before it."""
    create: Any = openai.responses.create
    system = {"role": "developer", "content": handbook(60)}
    body: dict[str, Any] = {
        **BODY,
        "tools": [SEARCH, WEATHER],
        "prompt_cache_options": {"mode": "implicit"},
    }
    items: list[Any] = [system, HI]
    first = create(**body, input=items, tool_choice={"type": "tool_search"})
    [search] = first.output
    assert search.type == "tool_search_call" and set(search.arguments) == {"city"}
    output = {**search.model_dump(), "type": "tool_search_output", "tools": [WEATHER]}
    output = {name: output[name] for name in ("type", "call_id", "execution", "status", "tools")}
    items += [*first.output, output]
    forced = {"type": "function", "name": "get_weather"}
    second = create(**body, input=items, tool_choice=forced)
    [call] = second.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
    third = create(**body, input=[*items, *second.output, answer])
    assert third.status in ("completed", "incomplete")
    for earlier, later in ((first, second), (second, third)):
        prompt_tokens = earlier.usage.input_tokens
        assert later.usage.input_tokens_details.cached_tokens >= prompt_tokens - 16


def test_a_custom_tool_of_chat_is_forced_and_answered(openai: OpenAI) -> None:
    create: Any = openai.chat.completions.create
    tool = {"type": "custom", "custom": {"name": "note", "description": "Keeps a note."}}
    forced = {"type": "custom", "custom": {"name": "note"}}
    body: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_tokens": 200}
    message = create(**body, messages=[HI], tool_choice=forced).choices[0].message
    [call] = message.tool_calls
    assert call.type == "custom" and call.custom.name == "note"
    result = {"role": "tool", "tool_call_id": call.id, "content": "Kept."}
    again = create(**body, messages=[HI, message, result]).choices[0]
    assert again.finish_reason in ("stop", "length", "tool_calls")


def test_generating_nothing_writes_what_the_next_turn_reads(openai: OpenAI) -> None:
    create: Any = openai.responses.create
    messages = [{"role": "developer", "content": handbook(61)}, HI]
    ready = create(**BODY, input=messages, extra_body={"generate": False})
    written_tokens = ready.usage.input_tokens_details.cache_write_tokens
    assert (ready.output, ready.usage.output_tokens) == ([], 0) and written_tokens > 1000
    turn = create(**BODY, input=[*messages, HI])
    assert turn.usage.input_tokens_details.cached_tokens >= written_tokens


# The SDK's type of a message in an output is the assistant's.
@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_a_compaction_is_gone_on_with(openai: OpenAI) -> None:
    items: list[Any] = [HI, {"role": "assistant", "content": "A hold on blocks."}, HI]
    compacted = openai.responses.compact(model=MODEL, input=items)
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
    *users, item = compacted.output
    assert [user.type for user in users] == ["message", "message"] and item.type == "compaction"
    carried: Any = [part.model_dump(exclude_none=True) for part in compacted.output]
    answer = openai.responses.create(**BODY, input=[*carried, HI])
    assert answer.usage is not None
    assert answer.usage.input_tokens > compacted.usage.output_tokens


def test_a_prompt_that_is_too_short_is_told_the_least(openai: OpenAI) -> None:
    options: Any = {"mode": "implicit"}
    answer = openai.responses.create(**BODY, input="Hi", prompt_cache_options=options)
    assert answer.model_extra is not None
    [report] = answer.model_extra["holdfast"]["breakpoints"]
    assert (report["reason"], report["min_cache_tokens"]) == ("below_minimum", 1024)
    assert report["tokens"] is None or report["tokens"] < 1024
