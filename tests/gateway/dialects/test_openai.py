"""Chat Completions and Completions through the official SDK, over a scripted engine."""

import json
from typing import Any

import pytest

from engine.protocol import (
    Finished,
    TextDelta,
    TextPart,
    ThinkingDelta,
    ToolChoice,
    ToolInputDelta,
    ToolResultPart,
    ToolUsePart,
    ToolUseStart,
)
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, chat, frames
from tests.gateway.serving import eventually


def test_an_answer_has_text_reason_and_inclusive_usage(stack: Stack) -> None:
    answer = chat(stack, user="u", metadata={"a": "b"}, store=False, service_tier="auto")
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there")
    assert choice.finish_reason == "stop"
    prompt_tokens = len("What is a lease?") // 4 + 1 + 4
    assert answer.usage.prompt_tokens == prompt_tokens
    assert answer.usage.completion_tokens == 2
    assert answer.usage.total_tokens == prompt_tokens + 2
    (automatic,) = answer.model_extra["holdfast"]["breakpoints"]
    assert automatic["path"] == "messages[0].content"
    assert answer.model_extra["holdfast"]["auto_cache"] == {"mode": "conversation", "ttl": "5m"}


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_has_usage_only_where_it_was_asked_for(stack: Stack, include_usage: bool) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "stream": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    with stack.http() as http:
        lines = http.post("/v1/chat/completions", json=body).text.split("\n\n")
    lines = [line for line in lines if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    last = chunks.pop() if include_usage else None
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": " there"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    if last is None:
        assert not any("usage" in chunk for chunk in chunks)
    else:
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2


def test_tool_calls_arrive_as_deltas_and_whole(stack: Stack) -> None:
    stack.engine.script = frames(
        TextDelta("Looking."),
        ToolUseStart("call_1", "look"),
        ToolInputDelta('{"where"'),
        ToolInputDelta(': "here"}'),
        ToolUseStart("call_2", "look"),
        Finished(reason="tool_use", output_tokens=9),
    )
    [choice] = chat(stack, tools=[LOOK]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Looking."
    calls = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert calls == [("call_1", "look", '{"where": "here"}'), ("call_2", "look", "")]
    client = stack.openai()
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[LOOK]) as events:
        for _ in events:
            pass
        [streamed] = events.get_final_completion().choices
    assert [(c.id, c.function.arguments) for c in streamed.message.tool_calls or []] == [
        ("call_1", '{"where": "here"}'),
        ("call_2", ""),
    ]


def test_an_answers_calls_can_be_sent_back_with_their_results(stack: Stack) -> None:
    stack.engine.script = frames(
        ThinkingDelta("I shall look."),
        ToolUseStart("call_1", "look"),
        ToolInputDelta('{"where": "here"}'),
        Finished(reason="tool_use", output_tokens=9, thinking_tokens=4),
    )
    answer = chat(stack, tools=[LOOK], reasoning_effort="low")
    assert stack.engine.requests[-1].thinking
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    message = answer.choices[0].message
    assert message.content is None
    assert message.model_extra == {
        "reasoning": "I shall look.",
        "reasoning_content": "I shall look.",
    }
    history = [
        *MESSAGES,
        message.model_dump(),
        {"role": "tool", "tool_call_id": "call_1", "content": "A hold."},
        {"role": "user", "content": "Go on."},
    ]
    chat(stack, messages=history, tools=[LOOK])
    sent = stack.engine.requests[-1].prompt.messages
    assert [m.role for m in sent] == ["user", "assistant", "user"]
    assert sent[1].parts[-1] == ToolUsePart("call_1", "look", {"where": "here"})
    assert sent[2].parts == [ToolResultPart("call_1", "A hold."), TextPart("Go on.")]


@pytest.mark.parametrize(
    "choice, expected",
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("any")),
        ({"type": "function", "function": {"name": "look"}}, ToolChoice("tool", "look")),
    ],
)
def test_tool_choices(stack: Stack, choice: Any, expected: ToolChoice) -> None:
    chat(stack, tools=[LOOK], tool_choice=choice)
    assert stack.engine.requests[-1].tool_choice == expected
    chat(stack, tools=[LOOK], tool_choice="auto", parallel_tool_calls=False)
    assert stack.engine.requests[-1].tool_choice == ToolChoice("auto", parallel=False)


def test_choices_are_kept_apart(stack: Stack) -> None:
    stack.engine.script = frames(
        TextDelta("one", choice=0),
        TextDelta("two", choice=1),
        TextDelta(" more", choice=0),
        Finished(reason="stop_sequence", stop_sequence="END", output_tokens=4, choice=1),
        Finished(reason="length", output_tokens=5, choice=0),
    )
    first, second = chat(stack, n=2, stop="END").choices
    assert (first.index, first.message.content, first.finish_reason) == (0, "one more", "length")
    assert (second.index, second.message.content, second.finish_reason) == (1, "two", "stop")
    assert second.model_extra["stop_reason"] == "END"
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.num_choices, sampling.stop_sequences) == (2, ["END"])


def test_sampling_fields_reach_the_engine(stack: Stack) -> None:
    chat(
        stack,
        max_completion_tokens=7,
        temperature=2,
        top_p=0.5,
        seed=3,
        stop=["a", "b"],
        extra_body={"top_k": -1, "ignore_eos": True, "min_tokens": 7, "repetition_penalty": 1.0},
    )
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 2.0, 0.5)
    assert (sampling.seed, sampling.top_k, sampling.ignore_eos) == (3, 0, True)
    assert sampling.stop_sequences == ["a", "b"]
    chat(stack)
    assert stack.engine.requests[-1].sampling.max_tokens is None


def test_models_are_listed_for_both_sdks(stack: Stack) -> None:
    ids = [model.id for model in stack.openai().models.list()]
    assert ids == [model.id for model in stack.sdk().models.list()]
    assert MODEL in ids
    model = stack.openai().models.retrieve(MODEL)
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "holdfast")
    assert stack.sdk().models.retrieve(MODEL).type == "model"


def test_a_turn_is_recorded_like_any_other(stack: Stack) -> None:
    answer = chat(stack)
    turn_id = answer.id.replace("chatcmpl-", "msg_")

    def recorded() -> list[Any]:
        turns = stack.admin("turns?limit=100").json()
        return [turn for turn in turns if turn["id"] == turn_id]

    eventually(recorded)
    [turn] = recorded()
    assert turn["output_tokens"] == answer.usage.completion_tokens
