"""Who may call, and what becomes of calls that make no sense."""

import json
import random
import re
from typing import Any

import httpx
import msgspec
import pytest
from litestar.routes import HTTPRoute

from engine.backends.contract import EngineBackend
from engine.protocol import Name
from engine.serve.health import ServedEngine
from engine.serve.server import create_app
from scripts.stack import ROOT
from tests.conformance.engines import SECRET, Engine, Refused, prompt

PROBES = {"/healthz", "/readyz", "/metrics"}


def _routes() -> set[tuple[str, str]]:
    """Every method and path that the server has, from the application itself."""

    def no_backend(_host: ServedEngine) -> EngineBackend:
        raise AssertionError("nothing is started")

    host = ServedEngine(lambda: None)
    app = create_app(no_backend, SECRET, host)
    return {
        (method, path)
        for path, methods in (
            (route.path, route.methods) for route in app.routes if isinstance(route, HTTPRoute)
        )
        for method in methods
    }


ROUTES = sorted(_routes())
CALLS = [
    (method, path.removeprefix("/v1/"))
    for method, path in ROUTES
    if path not in PROBES and method != "OPTIONS"
]
POSTS = [path for method, path in CALLS if method == "POST"]


def valid(engine: Engine) -> dict[str, Any]:
    """A good request's body as plain JSON values."""
    request = engine.request(prompt("one two three", "four"), engine.scope(), 0)
    body: dict[str, Any] = msgspec.to_builtins(request)
    return body


def refuse(engine: Engine, content: bytes, path: str = "generate") -> dict[str, str]:
    """The call must be refused as the client's mistake, in the protocol's words."""
    response = engine.client.post(f"/v1/{path}", content=content)
    assert 400 <= response.status_code < 500, (response.status_code, response.text)
    reply: dict[str, str] = response.json()
    assert set(reply) == {"code", "message"}
    return reply


def test_the_calls_are_those_of_the_protocol() -> None:
    page = (ROOT / "engine" / "PROTOCOL.md").read_text()
    told_calls = set(re.findall(r"^\| `(GET|POST|DELETE) /v1/([a-z/{}]+)", page, re.MULTILINE))
    assert told_calls == {(method, path.replace(":str}", "}")) for method, path in CALLS}


@pytest.mark.parametrize(("method", "path"), [route for route in ROUTES if route[1] not in PROBES])
def test_each_route_but_the_probes_needs_the_secret(engine: Engine, method: str, path: str) -> None:
    """Whatever the server has: who adds a route has it here."""
    wrong = (b"", SECRET.encode(), b"Bearer", f"Bearer {SECRET}x".encode(), b"\xc3\xa9 \xff")
    for header in (None, *wrong):
        request = engine.client.build_request(method, path)
        del request.headers["authorization"]
        if header is not None:
            headers = [(b"host", b"localhost"), (b"authorization", header)]
            request.headers = httpx.Headers(headers, encoding="latin-1")
        response = engine.client.send(request)
        assert response.status_code == 401, header
        message = "the engine secret is missing or wrong"
        assert response.json() == {"code": "unauthorized", "message": message}


@pytest.mark.parametrize("path", ["healthz", "readyz", "metrics"])
def test_the_probes_need_none_and_name_no_scope(engine: Engine, path: str) -> None:
    scope = engine.scope()
    secret_word = "zanzibar"
    engine.ask(prompt(secret_word * 20), scope, 0)
    request = engine.client.build_request("GET", f"/{path}")
    del request.headers["authorization"]
    response = engine.client.send(request)
    assert response.status_code == 200
    assert scope not in response.text and secret_word not in response.text


def test_the_description_is_whole(engine: Engine) -> None:
    described = engine.description
    assert described.protocol_version == 1
    assert described.epoch and described.model
    assert described.block_size * described.num_blocks > 0
    assert (described.granularity == 1) == engine.has("copy_on_write")
    assert engine.has("manual_clock")


def test_unknown_paths_and_methods_are_refused_in_the_protocols_words(engine: Engine) -> None:
    assert engine.client.get("/v1/nothing").json()["code"] == "not_found"
    assert engine.client.get("/v1/generate").status_code == 405


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe\x00",
        b'{"request_id": "\xc3\x28"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"scope": 1' + b"0" * 10_000 + b"}",
    ],
    ids=["empty", "cut", "null", "list", "not text", "bad utf-8", "deep", "deep map", "long int"],
)
@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_is_no_call_is_refused(engine: Engine, path: str, content: bytes) -> None:
    assert refuse(engine, content, path)["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("request_id", 7),
        ("scope", ""),
        ("scope", None),
        ("prompt", {"messages": []}),
        ("prompt", {"messages": [{"role": "user", "parts": [{"type": "picture"}]}]}),
        ("prompt", {"messages": [{"role": "robot", "parts": []}]}),
        ("prompt", {"messages": [], "surprise": 1}),
        ("sampling", {}),
        ("sampling", {"max_tokens": -1}),
        ("sampling", {"max_tokens": 1.5}),
        ("sampling", {"max_tokens": 1, "temperature": -1}),
        ("sampling", {"max_tokens": 1, "temperature": "hot"}),
        ("sampling", {"max_tokens": 1, "top_p": 0}),
        ("sampling", {"max_tokens": 1, "top_k": -1}),
        ("sampling", {"max_tokens": 1, "num_choices": 0}),
        ("sampling", {"max_tokens": 1, "num_choices": 1000}),
        ("sampling", {"max_tokens": 0, "num_choices": 2}),
        ("sampling", {"max_tokens": 1, "logprobs": -1}),
        ("sampling", {"max_tokens": 1, "logprobs": 21}),
        ("breakpoints", [{"segment": 2}]),
        ("breakpoints", [{"segment": -1}]),
        ("breakpoints", [{"segment": 0, "ttl": "2h"}]),
        ("breakpoints", [{"segment": 0}] * 5),
        ("names", [{"digest": "aa", "segment": 2}]),
        ("names", [{"digest": "aa", "segment": 0}] * 513),
        ("age_seconds", -1),
        ("age_seconds", 1e300),
        ("min_cache_tokens", -1),
        ("tool_choice", {"mode": "maybe"}),
        ("surprise", 1),
    ],
)
def test_a_wrong_field_is_refused(engine: Engine, field: str, value: Any) -> None:
    body = {**valid(engine), field: value}
    assert refuse(engine, json.dumps(body).encode())["code"] == "invalid_request"


@pytest.mark.parametrize("field", ["request_id", "scope", "prompt", "sampling"])
def test_a_missing_field_is_refused(engine: Engine, field: str) -> None:
    body = valid(engine)
    del body[field]
    assert field in refuse(engine, json.dumps(body).encode())["message"]


def test_odd_but_valid_values_are_served(engine: Engine) -> None:
    conversation = prompt("\x00 \u200b \U0001f600 é", "", system=("",))
    for sampling in ({"seed": 2**70}, {"seed": -1}, {"top_k": 2**40}, {"top_p": 1e-300}):
        engine.ask(conversation, engine.scope(), 0, 1, 2, **sampling)
    engine.ask(conversation, "scope \U0001f600 é\x00", 2)
    engine.ask(conversation, engine.scope(), 1, 1, 1, names=(Name("", 0), Name("not hex", 1, -5)))
    engine.ask(conversation, engine.scope(), 0, minimum=2**62)


def test_text_that_is_no_text_is_refused(engine: Engine) -> None:
    body = json.dumps(valid(engine)).replace("three", "\\ud800")
    assert refuse(engine, body.encode())["code"] == "invalid_request"


def test_a_deep_tool_schema_is_refused_or_served(engine: Engine) -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"a": schema}
    body = valid(engine)
    body["prompt"]["tools"] = [{"name": "deep", "input_schema": schema}]
    response = engine.client.post("/v1/generate", content=msgspec.json.encode(body))
    assert response.status_code < 500, response.text


@pytest.mark.parametrize(
    ("capability", "changes"),
    [
        ("multiple_choices", {"sampling": {"max_tokens": 1, "num_choices": 2}}),
        ("thinking", {"thinking": True}),
        ("forced_tools", {"tool_choice": {"mode": "any"}}),
        ("structured_output", {"output_schema": {"type": "object"}}),
        ("logprobs", {"sampling": {"max_tokens": 1, "logprobs": 1}}),
        ("own_template", {"sampling": {"max_tokens": 1, "ignore_eos": True}}),
        ("own_template", {"prompt": {"messages": [], "text": "raw"}, "breakpoints": []}),
        (
            "own_template",
            {
                "prompt": {
                    "messages": [
                        {"role": "user", "parts": [{"type": "text", "text": "Begin."}]},
                        {"role": "assistant", "parts": [{"type": "text", "text": "It"}]},
                    ]
                },
                "breakpoints": [],
            },
        ),
    ],
)
def test_what_is_not_declared_is_refused_as_unsupported(
    engine: Engine, capability: str, changes: dict[str, Any]
) -> None:
    if engine.has(capability):
        pytest.skip(f"declares {capability}")
    body = {**valid(engine), **changes}
    assert refuse(engine, json.dumps(body).encode())["code"] == "unsupported"


def test_a_prompt_that_cannot_fit_is_refused_before_the_stream(tiny_engine: Engine) -> None:
    too_long = "word " * max(tiny_engine.description.max_context_tokens, 4000)
    with pytest.raises(Refused) as refused:
        tiny_engine.ask(prompt(too_long), tiny_engine.scope())
    assert (refused.value.status, refused.value.reply["code"]) == (400, "prompt_too_long")
    assert "word" not in refused.value.reply["message"]


def test_an_error_never_repeats_the_prompt(engine: Engine) -> None:
    body = json.dumps(valid(engine)).replace('"four"', '{"zanzibar": "zanzibar"}')
    assert "zanzibar" not in json.dumps(refuse(engine, body.encode()))


def test_hundreds_of_broken_requests_never_make_a_server_error(engine: Engine) -> None:
    seed = 20_261
    rng = random.Random(seed)
    request = msgspec.structs.replace(
        engine.request(prompt("one two", "three"), engine.scope(), (0, "1h"), 1),
        names=[Name("00112233aabbccdd", 0, 3)],
    )
    good = msgspec.json.encode(request)
    for index in range(400):
        body = bytearray(good.replace(request.request_id.encode(), b"fuzz-%d" % index))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            what = rng.randrange(4)
            if what == 0:
                body[at] = rng.randrange(256)
            elif what == 1:
                del body[at : at + rng.randint(1, 20)]
            elif what == 2:
                body[at:at] = rng.choice(
                    [b"1e999", b'"', b"[[[[", b"null", b"-", b"\xf0\x28", b"{}"]
                )
            else:
                body[at:at] = body[at : at + rng.randint(1, 30)]
        with engine.client.stream("POST", "/v1/generate", content=bytes(body)) as response:
            assert response.status_code < 500, (seed, index, bytes(body), response.read())
    engine.wait_until_idle(30)
