"""Google's Interactions API through its official SDK, over a scripted engine."""

from collections.abc import Iterator
from typing import Any, get_args

import httpx
import msgspec
import pytest
from google.genai import interactions, types
from pydantic import BaseModel

from engine import protocol
from engine.protocol import GenerateRequest, TextPart, ThinkingPart, ToolResultPart, ToolUsePart
from gateway.dialects.interactions import request as wire
from tests.gateway.conftest import Stack, stacked
from tests.gateway.gemini_bodies import LONG_TEXT, MODEL, QUESTION, client
from tests.gateway.openai_bodies import frames
from tests.gateway.scripted_engine import say

LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
}
CALL = (
    protocol.ToolUseStart("call_a", "look"),
    protocol.ToolInputDelta('{"where"'),
    protocol.ToolInputDelta(': "here"}'),
)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stacked(tmp_path_factory.mktemp("keeping"), response_days=30) as stack:
        yield stack


@pytest.fixture
def keeping(kept: Stack) -> Stack:
    """A gateway that keeps interactions; its engine says "Hello there"."""
    kept.engine.script = say("Hello", " there")
    return kept


def create(stack: Stack, question: Any = QUESTION, **more: Any) -> Any:
    with client(stack) as sdk:
        return sdk.interactions.create(model=MODEL, input=question, **more)


def streamed(stack: Stack, **more: Any) -> list[Any]:
    with client(stack) as sdk:
        return list(sdk.interactions.create(model=MODEL, input=QUESTION, stream=True, **more))


def says(stack: Stack, *steps: protocol.Frame, reason: Any = "stop") -> None:
    stack.engine.script = frames(*steps, protocol.Finished(reason=reason, output_tokens=9))


def post(stack: Stack, **body: Any) -> httpx.Response:
    """The answer to a body that no SDK made."""
    return stack.post("/v1beta/interactions", json={"model": MODEL, "input": "Hi", **body})


def sent_to(stack: Stack) -> GenerateRequest:
    return stack.engine.requests[-1]


def texts_of(request: GenerateRequest) -> list[tuple[str, str]]:
    return [
        (message.role, part.text)
        for message in request.prompt.messages
        for part in message.parts
        if isinstance(part, TextPart)
    ]


def test_an_interaction_has_steps_status_and_usage(keeping: Stack) -> None:
    config = {"temperature": 0.5, "max_output_tokens": 9, "seed": 3, "stop_sequences": ["x"]}
    interaction = create(
        keeping, system_instruction="Answer in two words.", generation_config=config
    )
    assert interaction.output_text == "Hello there"
    assert (interaction.status, interaction.model, interaction.steps[0].type) == (
        "completed",
        MODEL,
        "model_output",
    )
    usage = interaction.usage
    assert usage.total_input_tokens == usage.input_tokens_by_modality[0].tokens > 0
    assert (usage.total_cached_tokens, usage.total_output_tokens) == (0, 2)
    assert usage.total_tokens == usage.total_input_tokens + 2
    sampling = sent_to(keeping).sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.seed) == (0.5, 9, 3)
    assert sampling.stop_sequences == ["x"]
    assert [part.text for part in sent_to(keeping).prompt.system] == ["Answer in two words."]


def test_an_interaction_that_is_kept_is_gone_on_with(keeping: Stack) -> None:
    first = create(keeping, "Hi", system_instruction="Be brief.")
    second = create(keeping, "And then?", previous_interaction_id=first.id)
    assert second.previous_interaction_id == first.id != second.id
    spoken = [("user", "Hi"), ("assistant", "Hello there"), ("user", "And then?")]
    request = sent_to(keeping)
    assert texts_of(request) == spoken and not request.prompt.system, (
        "as in Google's, not carried on"
    )
    third = create(keeping, "x", previous_interaction_id=second.id)
    assert texts_of(sent_to(keeping))[:3] == spoken and len(texts_of(sent_to(keeping))) == 5
    with client(keeping) as sdk:
        retrieved = sdk.interactions.get(id=second.id, include_input=True)
        assert retrieved.output_text == "Hello there"
        assert retrieved.usage.total_tokens == second.usage.total_tokens
        assert retrieved.input[0].content[0].text == "And then?"
        assert sdk.interactions.get(id=second.id).input is None
        sdk.interactions.delete(id=first.id)
        for call in (sdk.interactions.get, sdk.interactions.delete, sdk.interactions.cancel):
            with pytest.raises(Exception, match="not found") as caught:
                call(id=first.id)
            assert caught.value.status_code == 404  # type: ignore[attr-defined]
        with pytest.raises(Exception, match="only an interaction in the background"):
            sdk.interactions.cancel(id=second.id)
    create(keeping, "y", previous_interaction_id=third.id)
    assert ("user", "Hi") not in texts_of(sent_to(keeping)), "what is deleted is gone"
    with pytest.raises(Exception, match="Previous interaction with id") as caught:
        create(keeping, "y", previous_interaction_id=first.id)
    assert caught.value.status_code == 400  # type: ignore[attr-defined]


def test_what_is_not_kept_is_told(stack: Stack, keeping: Stack) -> None:
    first = post(stack).json()
    assert [ignored["path"] for ignored in first["holdfast"]["ignored"]] == ["store"]
    reply = post(stack, previous_interaction_id=first["id"])
    assert reply.status_code == 400 and "HOLDFAST_RESPONSE_DAYS" in reply.text
    assert "ignored" not in post(keeping).json()["holdfast"]
    unkept = post(keeping, store=False).json()
    assert "ignored" not in unkept["holdfast"]
    assert post(keeping, previous_interaction_id=unkept["id"]).status_code == 400
    # A response of OpenAI's API is no interaction.
    response = keeping.post("/v1/responses", json={"model": MODEL, "input": "Hi"}).json()
    assert post(keeping, previous_interaction_id=response["id"]).status_code == 400


def test_a_call_and_its_result_go_on_by_id_and_by_history(keeping: Stack) -> None:
    second = protocol.ToolUseStart("call_b", "look")
    says(keeping, protocol.TextDelta("Looking."), *CALL, second, reason="tool_use")
    question = {"type": "user_input", "content": [{"type": "text", "text": QUESTION}]}
    first = create(keeping, [question], tools=[LOOK])
    assert first.status == "requires_action"
    assert [step.type for step in first.steps] == ["model_output", "function_call", "function_call"]
    assert (first.steps[1].id, first.steps[1].arguments) == ("call_a", {"where": "here"})
    says(keeping, protocol.TextDelta("Seen."))
    results: list[dict[str, Any]] = [
        {"type": "function_result", "call_id": "call_b", "result": {"seen": 1}},
        {
            "type": "function_result",
            "call_id": "call_a",
            "name": "look",
            "is_error": True,
            "result": [{"type": "text", "text": "Dark."}],
        },
    ]
    create(keeping, results, tools=[LOOK], previous_interaction_id=first.id)
    by_id = sent_to(keeping).prompt
    assert by_id.messages[1].parts == [
        TextPart("Looking."),
        ToolUsePart("call_a", "look", {"where": "here"}),
        ToolUsePart("call_b", "look", {}),
    ]
    assert by_id.messages[2].parts == [
        ToolResultPart("call_b", '{"seen":1}', False),
        ToolResultPart("call_a", "Dark.", True),
    ]
    # The SDK's own objects, sent back.
    history = [question, *(step.model_dump(exclude_none=True) for step in first.steps), *results]
    create(keeping, history, tools=[LOOK], store=False)
    assert sent_to(keeping).prompt == by_id


def test_a_call_that_was_cut_does_not_end_the_conversation(keeping: Stack) -> None:
    says(keeping, protocol.TextDelta("Looking."), *CALL[:2], reason="length")
    cut = create(keeping, tools=[LOOK])
    assert (cut.status, len(cut.steps)) == ("incomplete", 1)
    says(keeping, *CALL[:2], reason="length")
    nothing = create(keeping, "On.", tools=[LOOK], previous_interaction_id=cut.id)
    assert (nothing.status, nothing.steps) == ("incomplete", [])
    says(keeping, protocol.TextDelta("Done."))
    create(keeping, "And?", tools=[LOOK], previous_interaction_id=nothing.id)
    texts = [text for _, text in texts_of(sent_to(keeping))]
    assert texts == [QUESTION, "Looking.", "On.", "And?"]


def test_a_stream_has_each_step_and_is_kept(keeping: Stack) -> None:
    answer_frames = [
        protocol.ThinkingDelta("Hm."),
        protocol.TextDelta("Look"),
        protocol.TextDelta("ing."),
    ]
    says(keeping, *answer_frames, *CALL, reason="tool_use")
    config = {"thinking_summaries": "auto", "thinking_level": "high"}
    events = streamed(keeping, tools=[LOOK], generation_config=config)
    kinds = [event.event_type for event in events]
    assert kinds[:2] == ["interaction.created", "interaction.status_update"]
    assert kinds[-1] == "interaction.completed"
    steps = [(e.index, e.step.type) for e in events if e.event_type == "step.start"]
    assert steps == [(0, "thought"), (1, "model_output"), (2, "function_call")]
    assert [e.index for e in events if e.event_type == "step.stop"] == [0, 1, 2]
    deltas = [event.delta for event in events if event.event_type == "step.delta"]
    assert deltas[0].content.text == "Hm."
    assert "".join(delta.text for delta in deltas if delta.type == "text") == "Looking."
    assert deltas[-1].arguments == '{"where":"here"}'
    last = events[-1].interaction
    assert last.status == "requires_action" and last.id == events[0].interaction.id
    assert last.usage.total_output_tokens + last.usage.total_thought_tokens == 9
    says(keeping, protocol.TextDelta("Seen."))
    result = {"type": "function_result", "call_id": "call_a", "result": "A hold."}
    create(keeping, [result], tools=[LOOK], previous_interaction_id=last.id)
    [_, answer, _] = sent_to(keeping).prompt.messages
    assert answer.parts[:2] == [ThinkingPart("Hm."), TextPart("Looking.")]


def test_a_stream_that_fails_ends_with_the_error(keeping: Stack) -> None:
    says(keeping, protocol.TextDelta("Hel"), reason="failed")
    last = streamed(keeping)[-1]
    assert last.event_type == "error"
    assert (last.error.code, last.error.message) == ("INTERNAL", "the engine failed")


def test_a_cached_content_is_read_and_counted(keeping: Stack) -> None:
    with client(keeping) as sdk:
        config = types.CreateCachedContentConfig(
            system_instruction=LONG_TEXT, contents=[types.UserContent("The house.")], ttl="600s"
        )
        content = sdk.caches.create(model=MODEL, config=config)
    interaction = create(keeping, cached_content=content.name)
    prompt = sent_to(keeping).prompt
    assert [part.text for part in prompt.system] == [LONG_TEXT]
    assert texts_of(sent_to(keeping)) == [("user", "The house."), ("user", QUESTION)]
    [point] = sent_to(keeping).breakpoints
    assert point.segment == 1
    usage = interaction.usage
    assert content.usage_metadata is not None
    assert usage.total_cached_tokens == content.usage_metadata.total_token_count
    assert usage.cached_tokens_by_modality[0].tokens == usage.total_cached_tokens
    assert usage.total_input_tokens > usage.total_cached_tokens > 0
    refused = post(keeping, cached_content=content.name, system_instruction="x")
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith(
        "cached_content: excludes system_instruction and tools"
    )
    assert post(keeping, cached_content="cachedContents/" + "0" * 24).status_code == 404


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ("none", "none", []),
        ("any", "any", []),
        ({"allowed_tools": {"mode": "any", "tools": ["look"]}}, "tool", []),
        ({"allowed_tools": {"mode": "auto", "tools": ["look"]}}, "auto", ["look"]),
    ],
)
def test_choices_of_tools_keep_the_prompt(
    keeping: Stack, choice: Any, mode: str, names: list[str]
) -> None:
    tools = [LOOK, {**LOOK, "name": "listen"}]
    create(keeping, tools=tools, generation_config={"tool_choice": choice})
    request = sent_to(keeping)
    assert (request.tool_choice.mode, request.tool_choice.names) == (mode, names)
    assert [tool.name for tool in request.prompt.tools] == ["look", "listen"]


def test_an_answer_is_held_to_a_schema(keeping: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "text", "mime_type": "application/json", "schema": schema}
    for response_format in (form, [form], schema):
        create(keeping, response_format=response_format)
        assert sent_to(keeping).output_schema == schema
    create(keeping, response_format={"type": "text"})
    assert sent_to(keeping).output_schema is None


def test_what_vendors_run_and_what_is_unknown_in_steps_is_left_out_and_told(
    keeping: Stack,
) -> None:
    steps = [
        {"type": "google_search_call", "id": "s", "arguments": {"queries": ["x"]}},
        {"type": "user_input", "content": [{"type": "text", "text": "Hi", "novel": 1}]},
        {"type": "thought", "signature": "abc"},
        {"type": "model_output", "content": [{"type": "image", "uri": "gs://x/y.png"}]},
        {"type": "text", "text": "On."},
    ]
    reply = post(
        keeping,
        input=steps,
        tools=[{"type": "google_search"}, LOOK],
        generation_config={"speech_config": {"voice": "x"}},
        service_tier="flex",
        safety_settings=[],
    )
    assert reply.status_code == 200, reply.text
    assert {ignored["path"] for ignored in reply.json()["holdfast"]["ignored"]} == {
        "input[0]",
        "input[1].content[0].novel",
        "input[3].content[0]",
        "tools[0]",
        "generation_config.speech_config",
    }


STEP = {"type": "user_input", "content": [{"type": "text", "text": "Hi"}]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"novel": 1}, 'Unknown name "novel"'),
    ({"background": True}, "background: not supported"),
    ({"agent": "deep-research"}, "agent: not supported"),
    ({"environment": "remote"}, "environment: not supported"),
    ({"webhook_config": {}}, "webhook_config: not supported"),
    ({"continuation_token": "x"}, "continuation_token: not supported"),
    ({"response_modalities": ["image"]}, "response_modalities: only text"),
    ({"response_format": {"type": "audio"}}, "response_format.type: only text"),
    ({"response_format": [{"type": "text"}] * 2}, "response_format: may have one format"),
    ({"generation_config": {"temperature": 9}}, "generation_config.temperature: "),
    ({"generation_config": {"novel": 1}}, "at 'generation_config'"),
    ({"generation_config": {"stop_sequences": [""]}}, "generation_config.stop_sequences: "),
    ({"generation_config": {"tool_choice": "some"}}, "generation_config.tool_choice: "),
    ({"generation_config": {"tool_choice": "any"}}, "generation_config.tool_choice: "),
    ({"generation_config": {"tool_choice": 3}}, "generation_config.tool_choice: must be"),
    ({"input": None}, "input: is required"),
    ({"input": []}, "input: is required"),
    ({"input": 5}, "input[0]: must be an object"),
    ({"input": ["x"]}, "input[0]: must be an object"),
    ({"input": [{"role": "user"}]}, "input[0].type: must be"),
    ({"input": [{"type": "novel"}]}, "input[0].type: must be"),
    ({"input": [STEP, {"type": "image"}]}, "input[1]: must have `data` or `uri`"),
    ({"input": [STEP, {"type": "text", "text": 5}]}, "input[1].text: Expected"),
    ({"input": [{"type": "model_output", "content": [STEP]}]}, "input[0].content[0].type: must"),
    (
        {"input": [STEP, {"type": "function_call", "id": "a", "name": "look"}, STEP]},
        "input: each function call must be answered",
    ),
    ({"input": [{"type": "function_result", "call_id": "a", "result": ""}]}, "input[0]: no functi"),
    ({"input": {"type": "model_output", "content": []}}, "input: must end with"),
    ({"tools": [{"type": "novel"}]}, "tools[0].type: must be `function`"),
    ({"tools": [{"type": "function"}]}, "tools[0].name: must not be empty"),
]


@pytest.mark.parametrize(("body", "reason"), BAD)
def test_a_bad_field_is_named_in_googles_envelope(
    keeping: Stack, body: dict[str, Any], reason: str
) -> None:
    reply = post(keeping, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert reason in error["message"]


OWN_STEPS = (
    "UserInputStep",
    "ModelOutputStep",
    "ThoughtStep",
    "FunctionCallStep",
    "FunctionResultStep",
)


def members(union: Any) -> list[type[BaseModel]]:
    """The classes of one of the SDK's open unions, but the one for what it does not know."""
    classes = get_args(get_args(union)[0])
    return [cls for cls in classes if not cls.__name__.startswith("Unknown")]


def test_every_field_of_the_sdks_types_is_known() -> None:
    """A field that a new version brings fails here, until it is done, told or refused."""
    sdks: list[tuple[type[BaseModel], type[msgspec.Struct]]] = [
        (interactions.CreateModelInteraction, wire.InteractionRequest),
        (interactions.GenerationConfig, wire.GenerationConfig),
        (interactions.AllowedTools, wire.AllowedTools),
        (interactions.Function, wire.Tool),
        *((cls, wire.Content) for cls in members(interactions.Content)),
        *((getattr(interactions, name), wire.Step) for name in OWN_STEPS),
    ]
    for theirs, ours in sdks:
        names = {field.alias or name for name, field in theirs.model_fields.items()}
        assert names <= {*ours.__struct_fields__}, theirs


def test_every_step_and_tool_of_the_sdk_can_be_sent(keeping: Stack) -> None:
    for cls in members(interactions.Step):
        kind = cls.model_fields["type"].default
        if cls.__name__ not in OWN_STEPS:
            reply = post(keeping, input=[{"type": kind}, STEP])
            assert reply.status_code == 200, (kind, reply.text)
            assert reply.json()["holdfast"]["ignored"][0]["path"] == "input[0]"
    for cls in members(interactions.Tool):
        tool = {"type": cls.model_fields["type"].default, "name": "look"}
        assert post(keeping, tools=[tool]).status_code == 200, tool


def test_errors_reach_the_sdk_as_its_own(keeping: Stack) -> None:
    with pytest.raises(Exception, match="background: not supported") as caught:
        create(keeping, background=True)
    assert caught.value.status_code == 400  # type: ignore[attr-defined]
    with client(keeping, "hf-" + "x" * 43) as sdk:
        with pytest.raises(Exception, match="API key not valid") as caught:
            sdk.interactions.create(model=MODEL, input="Hi")
    assert caught.value.status_code == 401  # type: ignore[attr-defined]
