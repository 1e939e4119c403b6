"""generateContent and its siblings through Google's official SDK, over a scripted engine."""

import json
import re
from enum import Enum
from typing import Any

import httpx
import pytest
from google.genai import errors, types

from engine import protocol
from tests.gateway.conftest import Stack
from tests.gateway.gemini_bodies import LOOK, MODEL, QUESTION, client, generate, model, post, user
from tests.gateway.openai_bodies import frames
from tests.gateway.serving import API_KEY

PROMPT_TOKENS = len(QUESTION) // 4 + 1 + 4


def test_an_answer_has_text_reason_and_usage(stack: Stack) -> None:
    answer = generate(stack, temperature=0.5, max_output_tokens=9, top_k=40, seed=3)
    [candidate] = answer.candidates or []
    assert answer.text == "Hello there"
    assert candidate.finish_reason == types.FinishReason.STOP
    assert candidate.content is not None and candidate.content.role == "model"
    usage = answer.usage_metadata
    assert usage is not None
    assert usage.prompt_token_count == PROMPT_TOKENS
    assert (usage.candidates_token_count, usage.total_token_count) == (2, PROMPT_TOKENS + 2)
    assert answer.model_version == MODEL
    assert answer.response_id is not None and answer.response_id.startswith("msg_")
    sampling = stack.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.5, 9)
    assert (sampling.top_k, sampling.seed) == (40, 3)


def test_a_response_to_a_call_may_come_in_the_role_tool(stack: Stack) -> None:
    """As the SDK's own documentation has it."""
    call = types.Part.from_function_call(name="look", args={"where": "here"})
    answer = types.Part.from_function_response(name="look", response={"result": "a cat"})
    reply = types.Content(role="tool", parts=[answer])
    contents = [types.UserContent(QUESTION), types.ModelContent([call]), reply]
    generate(stack, contents, tools=[types.Tool(function_declarations=[LOOK])])
    [_, called, answered] = stack.engine.requests[-1].prompt.messages
    assert (called.role, answered.role) == ("assistant", "user")
    assert isinstance(answered.parts[0], protocol.ToolResultPart)


CALL = (
    protocol.ToolUseStart("call_a", "look"),
    protocol.ToolInputDelta('{"where"'),
    protocol.ToolInputDelta(': "here"}'),
)


def test_calls_come_whole_and_go_back_with_their_results(stack: Stack) -> None:
    end = protocol.Finished(reason="tool_use", output_tokens=9)
    second = protocol.ToolUseStart("call_b", "look")
    stack.engine.script = frames(protocol.TextDelta("Looking."), *CALL, second, end)
    tool = types.Tool(function_declarations=[types.FunctionDeclaration(**LOOK)])
    answer = generate(stack, tools=[tool])
    calls = [(call.id, call.name, call.args) for call in answer.function_calls or []]
    assert calls == [("call_a", "look", {"where": "here"}), ("call_b", "look", {})]
    lowered_tool = stack.engine.requests[-1].prompt.tools[0]
    assert lowered_tool.input_schema == {
        "type": "object",
        "properties": {"where": {"type": "string"}},
    }
    assert answer.candidates and answer.candidates[0].content is not None
    results = [
        types.Part.from_function_response(name="look", response={"output": "A hold."}),
        types.Part.from_function_response(name="look", response={"error": "Dark.", "code": 3}),
        types.Part(text="Go on."),
    ]
    reply = types.Content(role="user", parts=results)
    generate(
        stack, [types.UserContent(QUESTION), answer.candidates[0].content, reply], tools=[tool]
    )
    question, called, answered = stack.engine.requests[-1].prompt.messages
    assert (question.role, called.role, answered.role) == ("user", "assistant", "user")
    assert called.parts[1:] == [
        protocol.ToolUsePart("call_a", "look", {"where": "here"}),
        protocol.ToolUsePart("call_b", "look", {}),
    ]
    assert answered.parts == [
        protocol.ToolResultPart("call_a", "A hold."),
        protocol.ToolResultPart("call_b", '{"error":"Dark.","code":3}'),
        protocol.TextPart("Go on."),
    ]


def test_thoughts_are_shown_only_where_they_are_asked_for(stack: Stack) -> None:
    stack.engine.script = frames(
        protocol.ThinkingDelta("Hm."),
        protocol.TextDelta("Yes."),
        protocol.Finished(reason="stop", output_tokens=9, thinking_tokens=4),
    )
    answer = generate(stack, thinking_config=types.ThinkingConfig(include_thoughts=True))
    assert answer.candidates and answer.candidates[0].content is not None
    parts = answer.candidates[0].content.parts or []
    assert [(part.text, part.thought) for part in parts] == [("Hm.", True), ("Yes.", None)]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata.thoughts_token_count == 4
    assert answer.usage_metadata.candidates_token_count == 5
    hidden = generate(stack, thinking_config=types.ThinkingConfig(thinking_budget=512))
    assert hidden.text == "Yes."
    assert stack.engine.requests[-1].thinking
    generate(stack, thinking_config=types.ThinkingConfig(thinking_budget=0))
    assert not stack.engine.requests[-1].thinking


@pytest.mark.parametrize(
    "mode, allowed, choice",
    [
        ("AUTO", [], protocol.ToolChoice()),
        ("NONE", [], protocol.ToolChoice("none")),
        ("ANY", [], protocol.ToolChoice("any")),
        ("ANY", ["look"], protocol.ToolChoice("tool", "look")),
        ("ANY", ["look", "hear"], protocol.ToolChoice("any", names=["look", "hear"])),
        ("ANY", ["look", "hear", "feel"], protocol.ToolChoice("any")),
        ("VALIDATED", [], protocol.ToolChoice()),
    ],
)
def test_modes_become_choices_of_tools(
    stack: Stack, mode: str, allowed: list[str], choice: protocol.ToolChoice
) -> None:
    functions = [{**LOOK, "name": name} for name in ("look", "hear", "feel")]
    config = {"mode": mode, "allowedFunctionNames": allowed}
    reply = post(
        stack,
        tools=[{"functionDeclarations": functions}],
        toolConfig={"functionCallingConfig": config},
    )
    assert reply.status_code == 200, reply.text
    assert stack.engine.requests[-1].tool_choice == choice


def test_schemas_of_google_become_json_schemas(stack: Stack) -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "b": {"type": "INTEGER", "nullable": True, "format": "int32"},
            "a": {"type": "ARRAY", "items": {"type": "STRING", "enum": ["x"]}, "maxItems": "3"},
        },
        "propertyOrdering": ["a", "b"],
        "required": ["a"],
    }
    reply = post(
        stack, generationConfig={"responseMimeType": "application/json", "responseSchema": schema}
    )
    assert reply.status_code == 200, reply.text
    converted = stack.engine.requests[-1].output_schema
    assert converted is not None
    first = {"type": "array", "items": {"type": "string", "enum": ["x"]}, "maxItems": 3}
    second = {"type": ["integer", "null"], "format": "int32"}
    properties = {"a": first, "b": second}
    assert converted == {"type": "object", "properties": properties, "required": ["a"]}
    assert list(converted["properties"]) == ["a", "b"]


def test_both_names_of_a_field_mean_the_same(stack: Stack) -> None:
    config = {"max_output_tokens": "7", "stop_sequences": ["x"], "topP": None}
    body = {
        "system_instruction": {"parts": {"text": "Be short."}},
        "contents": {"parts": {"text": "Hi"}},
        "generation_config": {**config, "speechConfig": {}},
        "safetySettings": [{"category": "HARM", "threshold": "NONE"}],
        "tools": [{"google_search": {}}, {"function_declarations": [LOOK]}],
    }
    reply = stack.post(f"/v1/models/{MODEL}:generateContent", json=body)
    assert reply.status_code == 200, reply.text
    request = stack.engine.requests[-1]
    assert [text.text for text in request.prompt.system] == ["Be short."]
    assert (request.sampling.max_tokens, request.sampling.stop_sequences) == (7, ["x"])
    ignored = [item["path"] for item in reply.json()["holdfast"]["ignored"]]
    undone = ["generationConfig.speechConfig", "safetySettings", "tools[0].googleSearch"]
    assert sorted(ignored) == undone


def test_a_file_that_no_model_reads_is_told_and_a_text_is_read(stack: Stack) -> None:
    parts = [
        {"text": "See"},
        {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}},
        {"inlineData": {"mimeType": "text/plain", "data": "aGVsbG8="}},
        {"fileData": {"mimeType": "application/pdf", "fileUri": "https://x/y.pdf"}},
    ]
    reply = post(stack, contents=[user(*parts)])
    [message] = stack.engine.requests[-1].prompt.messages
    texts = [part.text for part in message.parts if isinstance(part, protocol.TextPart)]
    assert texts[0] == "See" and texts[2] == "hello"
    assert texts[1] == "[image: PNG, not shown to this model]"
    assert texts[3].startswith("[document: PDF,")
    paths = [item["path"] for item in reply.json()["holdfast"]["ignored"]]
    assert paths == ["contents[0].parts[1].inlineData", "contents[0].parts[3].fileData"]


def test_tokens_are_counted_as_they_are_billed(stack: Stack) -> None:
    with client(stack) as sdk:
        counted = sdk.models.count_tokens(model=MODEL, contents=QUESTION)
    assert counted.total_tokens == generate(stack).usage_metadata.prompt_token_count  # type: ignore[union-attr]
    whole = {"generateContentRequest": {"model": "x", "contents": [user({"text": QUESTION})]}}
    reply = stack.post(f"/v1beta/models/{MODEL}:countTokens", json=whole)
    assert reply.json()["totalTokens"] == counted.total_tokens


def enum(**config: Any) -> dict[str, Any]:
    return {"generationConfig": {"responseMimeType": "text/x.enum", **config}}


CALLED = model({"functionCall": {"name": "f"}})
DECLARED = {"functionDeclarations": [{"name": "f", "parameters": {"maximum": 2**70}}]}
WORDS = {"type": "STRING", "enum": ["a"]}


@pytest.mark.parametrize(
    "body, field",
    [
        ({"contents": []}, "contents"),
        ({"contents": [user()]}, "contents[0].parts"),
        ({"contents": [model({"text": "x"})]}, "contents"),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [user({"text": 3})]}, "contents[0].parts[0].text"),
        ({"contents": [user({"text": "x", "fileData": {}})]}, "contents[0].parts[0]"),
        ({"contents": [user({"txt": "x"})]}, "contents[0].parts[0].txt"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generationConfig": {"presencePenalty": 3}}, "generationConfig.presencePenalty"),
        ({"generationConfig": {"candidateCount": 99}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseMimeType": "x/y"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseSchema": {}}}, "generationConfig.responseSchema"),
        ({"systemInstruction": user({"fileData": {}})}, "systemInstruction.parts[0]"),
        ({"contents": [user({"text": "x"}), CALLED, user({"text": "y"})]}, "contents"),
        (
            {"contents": [user({"functionResponse": {"name": "f"}})]},
            "contents[0].parts[0].functionResponse",
        ),
        ({"tools": [DECLARED]}, "tools[0].functionDeclarations[0].parameters"),
        (enum(), "generationConfig.responseSchema"),
        (enum(responseSchema={"type": "STRING"}), "generationConfig.responseSchema"),
        (
            enum(responseSchema={"type": "INTEGER", "enum": [1]}),
            "generationConfig.responseSchema",
        ),
        (enum(responseJsonSchema={"type": "string"}), "generationConfig.responseJsonSchema"),
        (
            enum(responseSchema=WORDS, responseLogprobs=True),
            "generationConfig.responseLogprobs",
        ),
    ],
)
def test_a_bad_field_is_named_in_googles_envelope(
    stack: Stack, body: dict[str, Any], field: str
) -> None:
    reply = post(stack, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["status"]) == (400, 400, "INVALID_ARGUMENT")
    violations, request = error["details"]
    assert violations["@type"].endswith("BadRequest")
    assert violations["fieldViolations"][0]["field"] == field
    assert request["requestId"] == reply.headers["x-request-id"]
    assert error["message"]


def test_errors_reach_the_sdk_as_its_own(stack: Stack) -> None:
    with client(stack, "hf-wrong") as sdk, pytest.raises(errors.ClientError) as caught:
        sdk.models.generate_content(model=MODEL, contents=QUESTION)
    assert (caught.value.code, caught.value.status) == (401, "UNAUTHENTICATED")
    with client(stack) as sdk:
        with pytest.raises(errors.ClientError) as missed:
            sdk.models.generate_content(model="nothing", contents=QUESTION)
        with pytest.raises(errors.ClientError, match="this server keeps no files") as refused:
            list(sdk.files.list())
    assert (missed.value.code, missed.value.status) == (404, "NOT_FOUND")
    assert refused.value.status == "NOT_FOUND"
    unknown = post(stack, "embedContent")
    assert (unknown.status_code, unknown.json()["error"]["status"]) == (404, "NOT_FOUND")


@pytest.mark.parametrize(
    "reason, reason_name", [("length", "MAX_TOKENS"), ("stop", "MALFORMED_FUNCTION_CALL")]
)
def test_a_call_that_is_no_json_is_left_out(stack: Stack, reason: Any, reason_name: str) -> None:
    stack.engine.script = frames(*CALL[:2], protocol.Finished(reason=reason, output_tokens=9))
    [candidate] = post(stack, tools=[{"functionDeclarations": [LOOK]}]).json()["candidates"]
    assert candidate["finishReason"] == reason_name
    assert candidate["content"]["parts"] == [{"text": ""}]


def test_the_key_may_stand_in_the_query_and_models_are_listed(stack: Stack) -> None:
    with httpx.Client(base_url=stack.url, timeout=120) as http:
        listed = http.get("/v1beta/models", params={"key": API_KEY}).json()
        assert http.get("/v1/models", headers={"x-goog-api-key": API_KEY}).json() == listed
        wrong = http.get("/v1beta/models")
    assert (wrong.status_code, wrong.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
    names = [listing["name"] for listing in listed["models"]]
    assert f"models/{MODEL}" in names
    with client(stack) as sdk:
        assert [listing.name for listing in sdk.models.list()] == names
        assert sdk.models.get(model=MODEL).input_token_limit == 100_000


class Animal(Enum):
    CAT = "a cat"
    DOG = "a dog"


ASKED: dict[str, Any] = {"response_mime_type": "text/x.enum", "response_schema": Animal}


def says(stack: Stack, *pieces: str, reason: Any = "stop") -> None:
    stack.engine.script = frames(
        *map(protocol.TextDelta, pieces), protocol.Finished(reason=reason, output_tokens=3)
    )


def streamed(stack: Stack, **config: Any) -> list[types.GenerateContentResponse]:
    generation = types.GenerateContentConfig(**config)
    with client(stack) as sdk:
        stream = sdk.models.generate_content_stream(
            model=MODEL, contents=QUESTION, config=generation
        )
        return list(stream)


def test_an_enum_is_answered_by_its_word(stack: Stack) -> None:
    says(stack, '"a ', "\\u0064o", 'g"')
    answer = generate(stack, **ASKED)
    assert answer.text == "a dog" and answer.parsed is Animal.DOG
    schema = stack.engine.requests[-1].output_schema
    assert schema is not None
    assert (schema["type"], schema["enum"]) == ("string", ["a cat", "a dog"])
    says(stack, '"a ', 'cat"')
    assert [chunk.text for chunk in streamed(stack, **ASKED)] == ["a cat"]
    says(stack, '"a c', reason="length")
    assert generate(stack, **ASKED).text == "a c", "a word that was cut off has no quotes"


def test_a_stream_has_its_end_and_usage_in_the_last_chunk(stack: Stack) -> None:
    """Heartbeats are blanks in an event: the SDK takes a comment of an event for broken JSON."""
    stack.engine.num_heartbeats = 2
    chunks = streamed(stack)
    assert "".join(chunk.text or "" for chunk in chunks) == "Hello there"
    ends = [chunk.candidates[0].finish_reason for chunk in chunks if chunk.candidates]
    assert ends == [None, None, types.FinishReason.STOP]
    assert [chunk.usage_metadata is None for chunk in chunks] == [True, True, False]


LINE = re.compile(r"data: (.*)\n\n")
"""Genkit and `@google/generative-ai` read a stream by this: between two matches may be nothing."""


def test_a_stream_has_nothing_between_its_events(stack: Stack) -> None:
    """Neither for a heartbeat nor for a frame that makes no chunk."""
    stack.engine.script = frames(*CALL, protocol.Finished(reason="tool_use", output_tokens=9))
    stack.engine.num_heartbeats = 2
    raw = post(stack, "streamGenerateContent?alt=sse").text
    chunks = []
    at = 0
    while match := LINE.match(raw, at):
        chunks.append(json.loads(match[1]))
        at = match.end()
    assert raw[at:].strip() == ""
    [call] = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert call["functionCall"]["args"] == {"where": "here"}


def test_a_stream_without_alt_is_one_json_list(stack: Stack) -> None:
    reply = post(stack, "streamGenerateContent")
    assert reply.headers["content-type"].startswith("application/json")
    chunks = reply.json()
    texts = [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks]
    assert texts == ["Hello", " there", ""]
    assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == 2


@pytest.mark.parametrize("alt", ["?alt=sse", ""])
def test_an_error_after_the_first_byte_is_the_streams_last_item(stack: Stack, alt: str) -> None:
    says(stack, "Hel", reason="failed")
    text = post(stack, f"streamGenerateContent{alt}").text
    if alt:
        events = [event for event in text.split("\n\n") if event.startswith("data: ")]
        text = f"[{','.join(event.removeprefix('data: ') for event in events)}]"
    assert json.loads(text)[-1]["error"]["status"] == "INTERNAL"
