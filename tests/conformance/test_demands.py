"""What a request may demand of the output: a call, one call, JSON of a schema."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import msgspec
import pytest

from engine.protocol import (
    GenerateRequest,
    Tool,
    ToolChoice,
    ToolInputDelta,
    ToolUseStart,
)
from tests.conformance.engines import Answer, Engine, Refused, prompt

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7},
                 "minItems": 1, "maxItems": 3},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [Tool("get_weather", SCHEMA, "The weather."), Tool("other", SCHEMA)]


def demand(engine: Engine, **changes: Any) -> GenerateRequest:
    request = engine.request(prompt("What is a lease?"), engine.scope(), 0, max_tokens=200)
    return msgspec.structs.replace(request, **changes)


def with_tools(engine: Engine, choice: ToolChoice, tools: list[Tool]) -> GenerateRequest:
    request = demand(engine, tool_choice=choice)
    return msgspec.structs.replace(
        request, prompt=msgspec.structs.replace(request.prompt, tools=tools)
    )


def answer(engine: Engine, request: GenerateRequest) -> Answer:
    with engine.stream(request) as stream:
        return stream.rest()


def calls(reply: Answer, choice: int = 0) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for frame in reply.frames:
        if isinstance(frame, ToolUseStart) and frame.choice == choice:
            pairs.append((frame.name, ""))
        elif isinstance(frame, ToolInputDelta) and frame.choice == choice:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + frame.partial_json)
    return pairs


def need(engine: Engine, capability: str) -> None:
    if not engine.has(capability):
        pytest.skip(f"does not declare {capability}")


def test_a_forced_call_is_made_and_validates(engine: Engine) -> None:
    need(engine, "forced_tools")
    choice = ToolChoice("tool", "other", parallel=False)
    reply = answer(engine, with_tools(engine, choice, TOOLS))
    [(name, arguments)] = calls(reply)
    assert name == "other" and reply.text() == ""
    jsonschema.validate(json.loads(arguments), SCHEMA)
    assert reply.finished[0].reason == "tool_use"


def test_every_choice_of_a_forced_request_calls(engine: Engine) -> None:
    need(engine, "forced_tools")
    need(engine, "multiple_choices")
    request = with_tools(engine, ToolChoice("any", parallel=False), TOOLS)
    sampling = msgspec.structs.replace(request.sampling, num_choices=3, temperature=1.5, seed=3)
    reply = answer(engine, msgspec.structs.replace(request, sampling=sampling))
    for choice in range(3):
        [(_, arguments)] = calls(reply, choice)
        jsonschema.validate(json.loads(arguments), SCHEMA)


def test_demands_do_not_touch_who_runs_beside_them(engine: Engine) -> None:
    need(engine, "forced_tools")
    plain = [answer(engine, demand(engine)).text() for _ in range(2)]
    requests: list[GenerateRequest] = []
    for _ in range(2):
        requests += [with_tools(engine, ToolChoice("any"), TOOLS), demand(engine)]
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda request: answer(engine, request), requests))
    assert [a.text() for a in replies[1::2]] == [plain[0]] * 2 == [plain[1]] * 2
    assert all(calls(a) for a in replies[::2])


def test_an_answer_of_a_schema_validates(engine: Engine) -> None:
    need(engine, "structured_output")
    reply = answer(engine, demand(engine, output_schema=SCHEMA))
    jsonschema.validate(json.loads(reply.text()), SCHEMA)
    assert reply.finished[0].reason == "stop"


@pytest.mark.parametrize(
    ("capability", "changes", "named"),
    [
        ("forced_tools", {"tool_choice": ToolChoice("any")}, "tool_choice"),
        ("forced_tools", {"tool_choice": ToolChoice("tool", "none")}, "tool_choice"),
        ("structured_output", {"output_schema": {"not": {}}}, "output_schema"),
    ],
)
def test_a_demand_that_cannot_be_met_is_refused_by_name(
    engine: Engine, capability: str, changes: dict[str, Any], named: str
) -> None:
    need(engine, capability)
    with pytest.raises(Refused) as refused:
        answer(engine, demand(engine, **changes))
    assert (refused.value.status, refused.value.reply["code"]) == (400, "invalid_request")
    assert named in refused.value.reply["message"]


def test_why_a_schema_is_refused_is_the_clients_to_read(engine: Engine) -> None:
    need(engine, "structured_output")
    with pytest.raises(Refused) as refused:
        answer(engine, demand(engine, output_schema={"if": {}}))
    assert refused.value.reply["is_public"] is True
    with pytest.raises(Refused) as refused:
        answer(engine, demand(engine, scope=""))
    assert refused.value.reply.get("is_public") is None


def test_a_tool_that_cannot_be_forced_is_named_and_can_still_be_offered(engine: Engine) -> None:
    need(engine, "forced_tools")
    tools = [*TOOLS, Tool("strange", {"type": "object", "properties": {"a": {"not": {}}}})]
    with pytest.raises(Refused) as refused:
        answer(engine, with_tools(engine, ToolChoice("any"), tools))
    assert refused.value.status == 400
    assert "strange" in refused.value.reply["message"]
    assert answer(engine, with_tools(engine, ToolChoice(), tools)).finished


@pytest.mark.parametrize("pattern", ["(yes|no/maybe)", "[a-c]{3}\n\\d{2}(/x){2}", "\\x{28}\\x{e9}"])
def test_a_text_matches_the_pattern_as_a_whole(engine: Engine, pattern: str) -> None:
    need(engine, "structured_output")
    reply = answer(engine, demand(engine, output_pattern=pattern))
    assert re.fullmatch(re.sub(r"\\x\{(..)\}", r"\\x\1", pattern), reply.text())
    assert [end.reason for end in reply.finished] == ["stop"]


def test_an_output_that_is_constrained_has_no_other_constraint_beside(engine: Engine) -> None:
    need(engine, "structured_output")
    request = demand(engine, output_pattern="a")
    for wrong in (
        msgspec.structs.replace(request, output_schema={}),
        msgspec.structs.replace(request, output_pattern="(a"),
        msgspec.structs.replace(
            request, sampling=msgspec.structs.replace(request.sampling, min_tokens=3)
        ),
    ):
        with pytest.raises(Refused) as refused:
            answer(engine, wrong)
        assert "output_pattern" in str(refused.value) or "min_tokens" in str(refused.value)
