from typing import Any

import anthropic
import msgspec
import pytest

from engine import protocol
from tests.gateway.bodies import SHORT, body, text, tool
from tests.gateway.conftest import Stack

SYSTEM = [text("You look things up. " * 300, SHORT)]


def rich(
    request: protocol.GenerateRequest, _: protocol.InputUsage
) -> list[protocol.Frame | float | bytes]:
    """Thinking, text and two calls, one of them without input."""
    return [
        protocol.ThinkingDelta("I "),
        protocol.ThinkingDelta("think."),
        protocol.TextDelta("Loo"),
        b"\n",
        protocol.TextDelta('king…\u2028\n"x"'),
        protocol.ToolUseStart("toolu_a", "look"),
        protocol.ToolInputDelta('{"what": '),
        protocol.ToolInputDelta('"lease"}'),
        protocol.ToolUseStart("toolu_b", "listen"),
        protocol.Finished(reason="tool_use", output_tokens=12, thinking_tokens=3),
        protocol.Done(request_id=request.request_id, output_tokens=12),
    ]


def create(stack: Stack, **changes: Any) -> Any:
    return stack.sdk().messages.create(**body(**changes))


def streamed(stack: Stack, **changes: Any) -> Any:
    with stack.sdk().messages.stream(**body(**changes)) as stream:
        return stream.get_final_message()


def test_a_streamed_response_equals_an_unstreamed_one(stack: Stack) -> None:
    stack.engine.script = rich
    request: dict[str, Any] = {
        "system": SYSTEM,
        "tools": [tool()],
        "thinking": {"type": "adaptive"},
    }
    create(stack, **request)
    plain = create(stack, **request)
    live = streamed(stack, **request)
    assert live.usage == plain.usage
    dumps = [[b.model_dump(exclude={"parsed_output"}) for b in m.content] for m in (live, plain)]
    assert dumps[0] == dumps[1]
    assert (live.stop_reason, live.model) == (plain.stop_reason, plain.model)
    kinds = [block.type for block in plain.content]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert plain.content[1].text == 'Looking…\u2028\n"x"'
    assert [block.input for block in plain.content[2:]] == [{"what": "lease"}, {}]
    assert plain.usage.output_tokens_details.thinking_tokens == 3


def test_stream_events_have_the_wires_frames_and_order(stack: Stack) -> None:
    stack.engine.script = rich
    request = body(stream=True, tools=[tool()], thinking={"type": "adaptive"})
    reply = stack.post("/v1/messages", json=request)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    frames = [f for f in reply.text.split("\n\n") if f.startswith("event: ")]
    kinds = []
    for frame in frames:
        name, data = frame.split("\n", 1)
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        kinds.append(event["type"].removeprefix("content_block_"))
    plain_block = ["start", "delta", "stop"]
    delta = ["start", "delta", "delta", "stop"]
    assert kinds == [
        "message_start",
        *["start", "ping", "delta", "delta", "delta", "stop"],
        *delta,
        *["start", "delta", "delta", "delta", "stop"],
        *plain_block,
        "message_delta",
        "message_stop",
    ]
    assert 'event: ping\ndata: {"type": "ping"}' in frames
    usage = msgspec.json.decode(frames[-2].split("data: ")[1])["usage"]
    assert "cache_creation" not in usage and usage["output_tokens"] == 12


def test_omitted_thinking_keeps_its_block_and_signature(stack: Stack) -> None:
    stack.engine.script = rich
    block = create(stack, thinking={"type": "adaptive", "display": "omitted"}).content[0]
    assert (block.type, block.thinking) == ("thinking", "") and block.signature


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
def test_thinking_nobody_asked_for_is_counted_and_not_shown(stack: Stack, thinking: Any) -> None:
    stack.engine.script = rich
    options = {} if thinking is None else {"thinking": thinking}
    plain = create(stack, **options)
    live = streamed(stack, **options)
    for message in (plain, live):
        assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
        assert message.usage.output_tokens_details.thinking_tokens == 3
        assert message.usage.output_tokens == 12
    # What comes together with what is shown needs no comment of its own.
    slow = protocol.ThinkingDelta
    stack.engine.script = lambda request, usage: [
        piece
        for step in rich(request, usage)
        for piece in ((step, 0.5) if isinstance(step, slow) else (step,))
    ]
    raw = stack.post("/v1/messages", json=body(stream=True, **options)).text
    begun = raw[raw.index("event: message_start") : raw.index("event: content_block_start")]
    assert begun.count(": \n\n") >= 1, "what is not shown keeps the connection alive"
    assert '"index":0' in raw and '"index":3' not in raw


TOO_LONG = "prompt is too long: 12 tokens > 10 maximum"


@pytest.mark.parametrize(
    "code, engine_message, status, kind, message",
    [
        ("prompt_too_long", TOO_LONG, 400, "invalid_request_error", TOO_LONG),
        ("overloaded", "secret", 529, "overloaded_error", "Overloaded"),
        ("not_ready", "secret", 529, "overloaded_error", "no engine is ready"),
        ("internal", "secret", 500, "api_error", "the engine failed"),
        ("invalid_request", "secret", 400, "invalid_request_error", "the engine"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_refusal_is_a_real_status(
    stack: Stack, code: Any, engine_message: str, status: int, kind: str, message: str, stream: bool
) -> None:
    stack.engine.refusal = protocol.ErrorReply(code, engine_message)
    reply = stack.post("/v1/messages", json=body(stream=stream))
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == kind
    assert reply.json()["error"]["message"].startswith(message)
    assert "secret" not in reply.text


@pytest.mark.parametrize(
    "broken, status",
    [
        pytest.param(
            [protocol.TextDelta("a"), protocol.Failed(code="internal", message="secret")],
            500,
            id="failed",
        ),
        pytest.param([protocol.TextDelta("a"), b"{nonsense}\n"], 500, id="not-a-frame"),
        pytest.param([protocol.TextDelta("a")], 529, id="ends-early"),
    ],
)
def test_a_failure_after_200_is_an_error_event_and_never_a_stop(
    stack: Stack, broken: list[protocol.Frame | float | bytes], status: int
) -> None:
    """An answer in one piece has not begun to go out, so its failure is a status."""
    stack.engine.script = lambda _request, _usage: broken
    live = stack.post("/v1/messages", json=body(stream=True))
    plain = stack.post("/v1/messages", json=body())
    assert live.status_code == 200 and plain.status_code == status
    assert "event: error" in live.text and "message_stop" not in live.text
    assert "secret" not in live.text + plain.text
    with pytest.raises(anthropic.APIStatusError):
        streamed(stack)


def test_unknown_models_and_versions_are_refused_and_engines_own_names_work(stack: Stack) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model: claude-sonnet-5"):
        create(stack, model="claude-sonnet-5")
    assert create(stack, model="scripted").model == "scripted"
    odd = stack.post("/v1/messages", json=body(), headers={"anthropic-version": "1999-01-01"})
    assert odd.status_code == 400
