"""What requests may demand of the output: schemas, forced calls, strict tools; both dialects."""

from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from engine.protocol import (
    ALLOWED_TOOLS,
    Capability,
    Done,
    ErrorReply,
    Finished,
    Frame,
    GenerateRequest,
    InputUsage,
    TextDelta,
    UnheldTool,
)
from gateway.base.logs import bound_request_id
from gateway.structs.fleet import EngineReport
from tests.gateway.bodies import SHORT, body, text, told, tool
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import LOOK, MESSAGES, MODEL, chat
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, HEADERS, eventually, serve, serve_gateway

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
STRICT = {**tool("look"), "strict": True}
STRICT_LOOK = {"type": "function", "function": {**LOOK["function"], "strict": True}}


def error(url: str, path: str, request: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{url}{path}", json=request, headers=HEADERS, timeout=120)
    assert reply.status_code == 400, reply.text
    detail: dict[str, Any] = reply.json()["error"]
    assert detail["type"] == "invalid_request_error"
    return detail


def refused(stack: Stack, **changes: Any) -> str:
    message: str = error(stack.url, "/v1/messages", body(**changes))["message"]
    return message


def refused_chat(stack: Stack, **changes: Any) -> dict[str, Any]:
    request = {"model": MODEL, "messages": MESSAGES, **changes}
    return error(stack.url, "/v1/chat/completions", request)


@pytest.mark.parametrize(
    "reply, ours, theirs, param",
    [
        (
            "tools[1].input_schema of `look`: can't be guaranteed: `not`",
            "tools.1.input_schema of `look`: can't be guaranteed: `not`",
            "tools[1].function.parameters of `look`: can't be guaranteed: `not`",
            "tools[1].function.parameters",
        ),
        (
            "output_schema: can't be guaranteed: `not`",
            "output_config.format.schema: can't be guaranteed: `not`",
            "response_format: can't be guaranteed: `not`",
            "response_format",
        ),
        ("the schemas are too much together", None, None, None),
    ],
)
def test_what_the_engine_wrote_for_the_client_is_said_in_the_clients_names(
    stack: Stack, reply: str, ours: str | None, theirs: str | None, param: str | None
) -> None:
    stack.engine.refusal = ErrorReply("invalid_request", reply, is_public=True)
    assert refused(stack) == (ours or reply)
    detail = refused_chat(stack)
    assert (detail["message"], detail["param"]) == (theirs or reply, param)
    stack.engine.refusal = ErrorReply("invalid_request", reply)
    assert refused(stack) == "the engine could not read the prompt"
    assert refused_chat(stack)["message"] == "the engine could not read the prompt"


def test_an_answer_outgrowing_its_schema_is_the_clients_error_as_its_row_says(stack: Stack) -> None:
    """It was a 500 that clients send again, and its row said 200 without an error."""

    def ends(request: GenerateRequest, _: InputUsage) -> list[Frame | float | bytes]:
        return [
            TextDelta('{"b": "'),
            Finished(reason="too_costly", output_tokens=3),
            Done(request_id=request.request_id, output_tokens=3),
        ]

    stack.engine.script = ends
    with capture_logs([lambda *line: {**line[2], "request_id": bound_request_id()}]) as logged:
        plain = stack.post("/v1/messages", json=body(output_config=FORMAT))
        live = stack.post("/v1/messages", json=body(output_config=FORMAT, stream=True))
        detail = refused_chat(stack, response_format=RESPONSE_FORMAT)
    assert plain.status_code == 400
    words = "output_config.format.schema: the answer can't be held to it: what may come next"
    for answer in (plain, live):
        assert words in answer.text and "invalid_request_error" in answer.text
    assert detail["param"] == "response_format" and "can't be held to it" in detail["message"]
    for answer, status in ((plain, 400), (live, 200)):
        [turn_id] = [
            line["turn"]
            for line in logged
            if line["event"] == "turn_failed" and line["request_id"] == answer.headers["request-id"]
        ]
        eventually(lambda turn_id=turn_id: stack.admin(f"turns/{turn_id}").status_code == 200)
        row = stack.admin(f"turns/{turn_id}").json()
        assert (row["status"], row["outcome"]) == (status, "invalid_request_error")
        assert "can't be held to it" in row["error"] and row["output_tokens"] > 0


def test_a_refused_tool_has_its_number_in_the_clients_list(stack: Stack) -> None:
    message = "tools[0].input_schema of `look`: can't be guaranteed: `not`"
    stack.engine.refusal = ErrorReply("invalid_request", message, is_public=True)
    search = {"type": "web_search_20250305", "name": "web_search"}
    fields = {"tools": [search, tool("look")], "tool_choice": {"type": "any"}}
    assert refused(stack, **fields) == message.replace("tools[0]", "tools.1")
    detail = refused_chat(stack, tools=[{"type": "web_search"}, LOOK], tool_choice="required")
    assert detail["param"] == "tools[1].function.parameters"


def test_strict_tools_that_the_model_calls_freely_are_held_where_the_engine_can(
    stack: Stack, tmp_path: Any
) -> None:
    plain = {**tool("see"), "strict": False}
    assert told(stack.sdk().messages.create(**body(tools=[plain, STRICT]))) == []
    assert [definition.strict for definition in stack.engine.requests[-1].prompt.tools] == [
        False,
        True,
    ]
    assert told(chat(stack, tools=[STRICT_LOOK])) == []
    assert stack.engine.requests[-1].prompt.tools[0].strict
    engine = ScriptedEngine(capabilities=("tools",))
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        freely = Stack(url, engine, tmp_path)
        message = freely.sdk().messages.create(**body(tools=[plain, STRICT]))
        assert [path for path, _ in told(message)] == ["tools.1.strict"]
        [(path, reason)] = told(chat(freely, tools=[STRICT_LOOK]))
        assert path == "tools[0].function.strict" and "calls freely" in reason


def test_a_strict_tool_that_no_grammar_holds_is_told_by_its_own_path(stack: Stack) -> None:
    stack.engine.unheld = [UnheldTool("look", "its schema has `not`")]
    search = {"type": "web_search_20250305", "name": "web_search"}
    message = stack.sdk().messages.create(**body(tools=[search, tool("see"), STRICT]))
    assert told(message)[1:] == [("tools.2.strict", "its schema has `not`")]


def test_a_choice_of_tools_that_no_grammar_holds_is_told_by_its_own_path(stack: Stack) -> None:
    """Beside a strict tool whose name is another one: each has its own path and reason."""
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    unheld = {"type": "function", "function": {"name": "other", "parameters": {}, "strict": True}}
    fields = {"tools": [LOOK, unheld], "tool_choice": choice}
    assert told(chat(stack, **fields)) == []
    stack.engine.unheld = [UnheldTool(ALLOWED_TOOLS, "its grammar is too much")]
    expected = ("tool_choice", "its grammar is too much")
    assert told(chat(stack, **fields)) == [expected]
    stack.engine.unheld.append(UnheldTool("other", "its schema has `not`"))
    assert sorted(told(chat(stack, **fields))) == [
        expected,
        ("tools[1].function.strict", "its schema has `not`"),
    ]


def test_what_an_engine_does_otherwise_is_told_by_its_path(stack: Stack) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": "Be brief."},
    ]
    stack.engine.folded = [2]
    completion = chat(stack, messages=[*messages, *MESSAGES])
    assert (completion.model_extra or {})["holdfast"]["folded"] == ["messages[2].content"]
    stack.engine.folded = []
    assert "folded" not in (chat(stack, messages=messages).model_extra or {})["holdfast"]
    # An entry may end before its marked text.
    stack.engine.inexact = [1]
    answer = stack.sdk().messages.create(**body(system=[text("Look it up.", SHORT)] * 2))
    points = (answer.model_extra or {})["holdfast"]["breakpoints"]
    assert [point.get("is_exact") for point in points] == [None, False]
    assert points[1]["path"] == "system.1"


def test_what_the_engine_or_its_servers_template_cannot_do_is_refused_by_the_fields_own_name(
    tmp_path: Any,
) -> None:
    can: tuple[Capability, ...] = ("tools",)
    engine = ScriptedEngine(capabilities=can, upstream="openai")
    begun = {"role": "assistant", "content": "Once"}
    turns = [{"role": "user", "parts": [{"text": "Begin."}]}]
    fields = {"model": MODEL, "messages": MESSAGES}
    messages = "/v1/messages"
    completions = "/v1/completions"
    chats = "/v1/chat/completions"
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        for path, request, words in (
            (
                messages,
                body(output_config=FORMAT),
                "output_config.format.schema: not supported by this model",
            ),
            (messages, body(tools=[tool("look")], tool_choice={"type": "any"}), "tool_choice: "),
            (chats, {**fields, "response_format": RESPONSE_FORMAT}, "response_format"),
            (completions, {"model": MODEL, "prompt": "Once upon"}, "prompt: "),
            (chats, {**fields, "ignore_eos": True}, "ignore_eos: "),
            (chats, {**fields, "top_k": 5}, "top_k: "),
            (messages, body(top_k=5), "top_k: "),
            (chats, {**fields, "messages": [*MESSAGES, begun]}, "messages: "),
        ):
            assert error(url, path, request)["message"].startswith(words)
        gemini = f"{url}/v1beta/models/{MODEL}:generateContent"
        contents = [*turns, {"role": "model", "parts": [{"text": "Once"}]}]
        key = {"x-goog-api-key": API_KEY}
        reply = httpx.post(gemini, json={"contents": contents}, headers=key, timeout=120)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith("contents: ")
        assert not engine.requests
        wished = {"contents": turns, "generationConfig": {"topK": 5}}
        reply = httpx.post(gemini, json=wished, headers=key, timeout=120)
        [ignored] = reply.json()["holdfast"]["ignored"]
        assert ignored["path"] == "generationConfig.topK"
        assert engine.requests[0].sampling.top_k is None


def test_an_engine_may_have_capabilities_that_its_gateway_does_not_know(tmp_path: Any) -> None:
    engine = ScriptedEngine(capabilities=("tools", "of_a_later_version"))
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        stack = Stack(url, engine, tmp_path)
        assert told(chat(stack, tools=[LOOK])) == []
        assert len(engine.requests) == 1
        assert "output_config" in refused(stack, output_config=FORMAT)
        [report] = msgspec.json.decode(stack.admin("engines").content, type=list[EngineReport])
        assert report.description is not None
        assert report.description.known_capabilities == {"tools"}
        assert tuple(report.description.capabilities) == engine.capabilities


def test_more_tokens_than_the_context_has_are_told_and_never_an_error(stack: Stack) -> None:
    assert told(stack.sdk().messages.create(**body(max_tokens=100_000))) == []
    reason = "an answer ends where the context of 100000 is full"
    for answer, path in (
        (stack.sdk().messages.create(**body(max_tokens=100_001), timeout=60), "max_tokens"),
        (chat(stack, max_completion_tokens=100_001), "max_tokens"),
    ):
        assert told(answer) == [(path, reason)]
