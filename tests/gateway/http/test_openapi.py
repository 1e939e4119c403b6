"""The description of the API is valid, complete, and true of what is served."""

import os
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from litestar.routes import HTTPRoute
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.gateway.bodies import body, conversation
from tests.gateway.conftest import Stack
from tests.gateway.openai_bodies import MESSAGES
from tests.gateway.operations import APPLICATION, DOCUMENT, OPERATIONS
from tests.gateway.serving import ADMIN_KEY, API_KEY, HEADERS

# Of all operations together; SCHEMA_CASES raises it (scripts/long_tests schema).
NUM_CASES = int(os.environ.get("SCHEMA_CASES", "300"))
NUM_PER_OPERATION = -(-NUM_CASES // len(OPERATIONS))
# Every other check of schemathesis applies.
EXCLUDED = [
    # Rules between fields (markers, roles, ids) are no part of a schema: breaking one is a 400.
    positive_data_acceptance
]


def test_every_route_is_described_and_nothing_else() -> None:
    served = {
        (route.path_format, method.lower())
        for route in APPLICATION.routes
        if isinstance(route, HTTPRoute)
        for method in route.methods
        if method != "OPTIONS"
    }
    assert served == {(operation.path, operation.method) for operation in OPERATIONS}
    assert all(operation.id and operation.summary for operation in OPERATIONS)
    assert len({operation.id for operation in OPERATIONS}) == len(OPERATIONS)


def test_the_description_is_valid_openapi_and_served(stack: Stack) -> None:
    reply = httpx.get(f"{stack.url}/openapi.json", timeout=120)
    assert reply.headers["content-type"] == "application/json"
    document = reply.json()
    assert document == DOCUMENT
    schemathesis.openapi.from_dict(document).validate()
    assert "gateway." not in "".join(document["components"]["schemas"])


def test_the_description_is_made_once_and_not_for_every_request(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may ask for it: what it costs must not grow with how often it is asked for."""
    schemas = []
    monkeypatch.setattr(msgspec.json, "schema_components", schemas.append)
    replies = {httpx.get(f"{stack.url}/openapi.json", timeout=120).content for _ in range(3)}
    assert len(replies) == 1 and not schemas


def test_errors_name_their_type_and_the_envelope(stack: Stack) -> None:
    responses = DOCUMENT["paths"]["/v1/messages"]["post"]["responses"]
    assert set(responses) == {
        *("200", "400", "401", "402", "403", "404", "405", "413", "415", "429", "500", "504"),
        "529",
    }
    (envelope, kind) = responses["529"]["content"]["application/json"]["schema"]["allOf"]
    assert envelope["$ref"].endswith("/AnthropicError")
    assert kind["properties"]["error"]["properties"]["type"]["const"] == "overloaded_error"


@pytest.fixture(scope="module")
def schema(shared: Stack) -> Any:
    """Read once: what it has made of the components' schemas serves every operation."""
    return schemathesis.openapi.from_url(f"{shared.url}/openapi.json")


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.id)
def test_what_is_answered_is_what_is_described(stack: Stack, schema: Any, operation: Any) -> None:
    """Generated from the description: status, content type, headers and body conform to it."""
    (described,) = schema.include(operation_id=operation.id).get_all_operations()
    key = ADMIN_KEY if "adminKey" in operation.keys else API_KEY

    has_input = operation.body is not None or operation.parameters
    modes = list(GenerationMode) if has_input else [GenerationMode.POSITIVE]

    @settings(
        max_examples=NUM_PER_OPERATION,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(st.one_of([described.ok().as_strategy(generation_mode=mode) for mode in modes]))
    def drive(case: Any) -> None:
        reply = case.call(headers={"x-api-key": key}, timeout=180)
        lenient = [negative_data_rejection] if operation.is_lenient else []
        case.validate_response(reply, excluded_checks=[*EXCLUDED, *lenient])
        assert reply.status_code < 500

    drive()


@pytest.mark.parametrize(
    "path, stream",
    [(p, s) for p in ("/v1/chat/completions", "/v1/completions") for s in (False, True)],
)
def test_a_whole_openai_answer_conforms(stack: Stack, schema: Any, path: str, stream: bool) -> None:
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "Once"}
    case = schema[path]["POST"].Case(
        body={"model": "holdfast-demo", **prompt, "stream": stream, "user": "u", "logprobs": None},
        media_type="application/json",
    )
    reply = case.call_and_validate(headers={"x-api-key": API_KEY}, timeout=180)
    assert reply.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_conforms_too(stack: Stack, schema: Any, stream: bool) -> None:
    request = {**conversation(), "diagnostics": {"previous_message_id": "msg_none"}}
    case = schema["/v1/messages"]["POST"].Case(
        body={**request, "stream": stream}, headers=HEADERS, media_type="application/json"
    )
    reply = case.call_and_validate(timeout=180)
    assert reply.status_code == 200
    assert "previous_message_not_found" in reply.text


def test_a_405_names_the_methods_that_are_allowed(stack: Stack) -> None:
    reply = httpx.get(f"{stack.url}/v1/messages", timeout=120)
    assert reply.status_code == 405
    assert "POST" in reply.headers["allow"]
    assert reply.json()["error"]["message"] == "method not allowed: GET; use POST"


def test_responses_name_the_organization_and_workspace_and_no_invented_limits(stack: Stack) -> None:
    with stack.http() as http:
        reply = http.post("/v1/messages", json=body())
        streamed = http.post("/v1/messages", json=body(stream=True))
        refused = http.post("/v1/messages", json=body(max_tokens=-1))
    assert refused.status_code == 400
    for answer in (reply, streamed, refused):
        assert answer.headers["request-id"].startswith("req_")
        assert answer.headers["anthropic-workspace-id"] == "default"
        assert len(answer.headers["anthropic-organization-id"]) == 36
        assert not [name for name in answer.headers if name.startswith("anthropic-ratelimit")]
    assert "anthropic-workspace-id" not in httpx.get(f"{stack.url}/healthz", timeout=120).headers
