"""What a request may demand of the output: a call, one call, JSON of a schema."""

import json
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
    asked = engine.request(prompt("What is a lease?"), engine.scope(), 0, max_tokens=200)
    return msgspec.structs.replace(asked, **changes)


def with_tools(engine: Engine, choice: ToolChoice, tools: list[Tool]) -> GenerateRequest:
    asked = demand(engine, tool_choice=choice)
    return msgspec.structs.replace(asked, prompt=msgspec.structs.replace(asked.prompt, tools=tools))


def answer(engine: Engine, request: GenerateRequest) -> Answer:
    with engine.stream(request) as stream:
        return stream.rest()


def calls(given: Answer, choice: int = 0) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for frame in given.frames:
        if isinstance(frame, ToolUseStart) and frame.choice == choice:
            found.append((frame.name, ""))
        elif isinstance(frame, ToolInputDelta) and frame.choice == choice:
            found[-1] = (found[-1][0], found[-1][1] + frame.partial_json)
    return found


def need(engine: Engine, capability: str) -> None:
    if not engine.has(capability):
        pytest.skip(f"does not declare {capability}")


def test_a_forced_call_is_made_and_validates(engine: Engine) -> None:
    need(engine, "forced_tools")
    choice = ToolChoice("tool", "other", parallel=False)
    given = answer(engine, with_tools(engine, choice, TOOLS))
    [(name, written)] = calls(given)
    assert name == "other" and given.text() == ""
    jsonschema.validate(json.loads(written), SCHEMA)
    assert given.finished[0].reason == "tool_use"


def test_every_choice_of_a_forced_request_calls(engine: Engine) -> None:
    need(engine, "forced_tools")
    need(engine, "multiple_choices")
    asked = with_tools(engine, ToolChoice("any", parallel=False), TOOLS)
    sampling = msgspec.structs.replace(asked.sampling, num_choices=3, temperature=1.5, seed=3)
    given = answer(engine, msgspec.structs.replace(asked, sampling=sampling))
    for choice in range(3):
        [(_, written)] = calls(given, choice)
        jsonschema.validate(json.loads(written), SCHEMA)


def test_demands_do_not_touch_who_runs_beside_them(engine: Engine) -> None:
    need(engine, "forced_tools")
    plain = [answer(engine, demand(engine)).text() for _ in range(2)]
    asked: list[GenerateRequest] = []
    for _ in range(2):
        asked += [with_tools(engine, ToolChoice("any"), TOOLS), demand(engine)]
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(lambda request: answer(engine, request), asked))
    assert [a.text() for a in given[1::2]] == [plain[0]] * 2 == [plain[1]] * 2
    assert all(calls(a) for a in given[::2])


def test_an_answer_of_a_schema_validates(engine: Engine) -> None:
    need(engine, "structured_output")
    given = answer(engine, demand(engine, output_schema=SCHEMA))
    jsonschema.validate(json.loads(given.text()), SCHEMA)
    assert given.finished[0].reason == "stop"


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
