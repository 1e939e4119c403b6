"""Whatever a model said, and wherever it was cut: the answer can be sent back in its dialect."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from google.genai import types
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import protocol
from engine.protocol import Frame
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import QUESTION, client, generate
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, chat, frames

PARAMETERS = LOOK["function"]["parameters"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
INPUTS = st.dictionaries(TEXTS, VALUES, max_size=3).map(json.dumps)
REASONS: list[protocol.FinishReason] = ["stop", "length", "stop_sequence", "tool_use", "context"]


@st.composite
def turns(draw: st.DrawFn) -> list[Frame]:
    """A turn's frames: thinking, text and calls, cut behind any of their characters."""
    whole: list[Frame] = []
    if draw(st.booleans()):
        whole += [protocol.ThinkingDelta(char) for char in draw(TEXTS)]
    if draw(st.booleans()):
        whole += [protocol.TextDelta(char) for char in draw(TEXTS)]
    for number in range(draw(st.integers(0, 2))):
        whole.append(protocol.ToolUseStart(f"call_{number}", "look"))
        whole += [protocol.ToolInputDelta(char) for char in draw(INPUTS)]
    cut = draw(st.integers(0, len(whole)))
    reason = draw(st.sampled_from(REASONS))
    end = protocol.Finished(reason=reason, output_tokens=len(whole) + 1)
    return [*whole[:cut], end]


def in_chat(stack: Stack, end: Callable[[], None]) -> None:
    [choice] = chat(stack, tools=[LOOK]).choices
    message = choice.message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        for call in message.tool_calls or []
    ]
    end()
    go_on = {"role": "user", "content": "Go on."}
    chat(stack, messages=[*MESSAGES, message, *results, go_on], tools=[LOOK])


def in_chat_as_text(stack: Stack, end: Callable[[], None]) -> None:
    """A custom tool's input is whatever text the model wrote."""
    tools = [{"type": "custom", "custom": {"name": "look"}}]
    [choice] = chat(stack, tools=tools).choices
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
        for call in choice.message.tool_calls or []
    ]
    end()
    chat(stack, messages=[*MESSAGES, choice.message, *results, MESSAGES[0]], tools=tools)


def in_messages(stack: Stack, end: Callable[[], None]) -> None:
    create: Any = stack.sdk().messages.create
    body = {"model": MODEL, "max_tokens": 64}
    tools = [{"name": "look", "input_schema": PARAMETERS}]
    answer = create(**body, messages=MESSAGES, tools=tools, thinking={"type": "adaptive"})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}
        for block in answer.content
        if block.type == "tool_use"
    ]
    end()
    message = {"role": "assistant", "content": answer.content}
    reply = {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]}
    create(**body, messages=[*MESSAGES, message, reply], tools=tools, thinking={"type": "adaptive"})


def in_responses(stack: Stack, end: Callable[[], None]) -> None:
    create: Any = stack.openai().responses.create
    tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
    question = {"role": "user", "content": "Where?"}
    answer = create(model=MODEL, input=[question], tools=tools, store=False)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
        for item in answer.output
        if item.type == "function_call"
    ]
    end()
    go_on = {"role": "user", "content": "Go on."}
    create(model=MODEL, input=[question, *answer.output, *results, go_on], tools=tools, store=False)


def in_gemini(stack: Stack, end: Callable[[], None]) -> None:
    look = {"name": "look", "parameters_json_schema": PARAMETERS}
    tools = [types.Tool(function_declarations=[types.FunctionDeclaration(**look)])]
    answer = generate(stack, tools=tools)
    [candidate] = answer.candidates or []
    contents: list[Any] = [types.UserContent(QUESTION)]
    if candidate.content is not None:
        contents.append(candidate.content)
    results = [
        types.Part.from_function_response(name=call.name or "", response={"output": "Rain."})
        for call in answer.function_calls or []
    ]
    contents.append(types.Content(role="user", parts=[*results, types.Part(text="Go on.")]))
    end()
    generate(stack, contents, tools=tools)


def in_interactions(stack: Stack, end: Callable[[], None]) -> None:
    tools = [{"type": "function", "name": "look", "parameters": PARAMETERS}]
    config = {"thinking_summaries": "auto"}
    with client(stack) as sdk:
        create: Any = partial(sdk.interactions.create, model=MODEL, tools=tools, store=False)
        answer = create(input=QUESTION, generation_config=config)
        results = [
            {"type": "function_result", "call_id": step.id, "result": "Rain."}
            for step in answer.steps
            if step.type == "function_call"
        ]
        steps = [step.model_dump(exclude_none=True) for step in answer.steps]
        question, go_on = (
            {"type": "user_input", "content": [{"type": "text", "text": text}]}
            for text in (QUESTION, "Go on.")
        )
        end()
        create(input=[question, *steps, *results, go_on])


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize(
    "send", [in_chat, in_chat_as_text, in_messages, in_responses, in_gemini, in_interactions]
)
def test_any_answer_can_be_sent_back(
    stack: Stack, send: Callable[[Stack, Callable[[], None]], None]
) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(turn=turns())
    def sends(turn: list[Frame]) -> None:
        stack.engine.script = frames(*turn)

        def end() -> None:
            stack.engine.script = frames(protocol.Finished(reason="stop", output_tokens=1))

        send(stack, end)

    sends()
