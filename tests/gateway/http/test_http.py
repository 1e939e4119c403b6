"""Statuses, envelopes, keys and probes: everything around a turn."""

from pathlib import Path

import httpx
import pytest

from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ADMIN_KEY, API_KEY, eventually, serve, serve_gateway

VERSION = {"anthropic-version": "2023-06-01"}


def check_envelope(reply: httpx.Response, status: int, kind: str) -> str:
    assert reply.status_code == status, reply.text
    envelope = reply.json()
    assert envelope["type"] == "error" and envelope["error"]["type"] == kind
    assert envelope["request_id"] == reply.headers["request-id"]
    message: str = envelope["error"]["message"]
    return message


@pytest.mark.parametrize(
    "method, path, headers, content, status, kind",
    [
        ("GET", "/nowhere", {}, b"", 404, "not_found_error"),
        ("GET", "/v1/messages", {}, b"", 405, "invalid_request_error"),
        (
            "POST",
            "/v1/messages",
            {"content-type": "text/plain"},
            b"{}",
            415,
            "invalid_request_error",
        ),
        ("POST", "/v1/messages", {}, b"{}", 415, "invalid_request_error"),
        (
            "POST",
            "/v1/messages",
            {"content-type": "application/json; charset=utf-16"},
            b"{}",
            415,
            "invalid_request_error",
        ),
        (
            "POST",
            "/v1/messages",
            {"content-type": "application/json", "content-encoding": "gzip"},
            b"{}",
            415,
            "invalid_request_error",
        ),
        (
            "POST",
            "/v1/messages",
            {"content-type": "application/json"},
            b"[" * 100_000,
            400,
            "invalid_request_error",
        ),
        ("GET", "/v1/models/none", {}, b"", 404, "not_found_error"),
        ("GET", "/v1/models?limit=0", {}, b"", 400, "invalid_request_error"),
        ("GET", "/admin/v1/engines", {}, b"", 403, "permission_error"),
    ],
)
def test_every_failure_has_the_one_envelope(
    stack: Stack,
    method: str,
    path: str,
    headers: dict[str, str],
    content: bytes,
    status: int,
    kind: str,
) -> None:
    with stack.http() as http:
        reply = http.request(method, path, headers=headers, content=content)
    check_envelope(reply, status, kind)


def test_keys_come_as_either_header_and_nothing_else_works(stack: Stack) -> None:
    def ask(headers: dict[str, str]) -> httpx.Response:
        return httpx.post(
            f"{stack.url}/v1/messages", json=body(), headers={**VERSION, **headers}, timeout=120
        )

    assert ask({"x-api-key": API_KEY}).status_code == 200
    assert ask({"authorization": f"Bearer {API_KEY}"}).status_code == 200
    missing = check_envelope(ask({}), 401, "authentication_error")
    assert missing == "x-api-key header is required"
    for wrong in ("x", API_KEY + "x", ADMIN_KEY):
        reply = ask({"x-api-key": wrong})
        assert check_envelope(reply, 401, "authentication_error") == "invalid x-api-key"
    assert ask({"authorization": "Basic abc"}).status_code == 401


def test_readiness_follows_the_engine_and_passes_its_progress_on(stack: Stack) -> None:
    ready = httpx.get(f"{stack.url}/readyz", timeout=120)
    assert ready.status_code == 200 and ready.json()["engines"][0]["model"] == "scripted"
    stack.engine.is_ready = False
    eventually(lambda: httpx.get(f"{stack.url}/readyz", timeout=120).status_code == 503)
    engine = httpx.get(f"{stack.url}/readyz", timeout=120).json()["engines"][0]
    assert engine["status"] == "starting" and engine["detail"]["progress"] == 0.5
    health = httpx.get(f"{stack.url}/health", timeout=120)  # as vLLM names it, for GuideLLM
    assert health.status_code == 503 and health.json()["engines"][0]["status"] == "starting"
    assert httpx.get(f"{stack.url}/healthz", timeout=120).status_code == 200
    with stack.http() as http:
        check_envelope(http.post("/v1/messages", json=body()), 529, "overloaded_error")


def test_claude_ids_mean_the_default_model_where_that_is_switched_on(tmp_path: Path) -> None:

    with (
        serve(ScriptedEngine()) as engine,
        serve_gateway(tmp_path, engine, claude_alias=True) as url,
        httpx.Client(base_url=url, headers={**VERSION, "x-api-key": API_KEY}, timeout=120) as http,
    ):
        reply = http.post("/v1/messages", json=body(model="claude-sonnet-5-5"))
        assert reply.json()["model"] == "claude-sonnet-5-5"
        assert http.post("/v1/messages", json=body(model="gpt-5")).status_code == 404


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/v1/messages", "not found: /v1/v1/messages; did you mean /v1/messages? Anthropic"),
        ("/chat/completions", "not found: /chat/completions; did you mean /v1/chat/completions? A"),
        ("/v1/mesages", "not found: /v1/mesages; did you mean /v1/messages?"),
        ("/models/x:generateContent", "did you mean /v1beta/models/MODEL:generateContent?"),
        ("/nowhere", "not found: /nowhere"),
        ("/v1/embeddings", "not found: /v1/embeddings; this server makes no embeddings"),
        ("/embeddings", "not found: /embeddings; this server makes no embeddings"),
        ("/v1/files/file_1/content", "this server keeps no files"),
        ("/v1beta/interactions", "this server keeps no interactions: use generateContent"),
        ("/", "described at /openapi.json"),
        ("/" + "a" * 5000, "not found: /" + "a" * 99),
    ],
)
def test_a_path_that_is_not_served_is_told_with_the_nearest_one(
    stack: Stack, path: str, told: str
) -> None:
    with stack.http() as http:
        reply = http.post(path, json={})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert told in message and len(message) < 300


def test_a_model_that_nothing_serves_is_told_with_those_that_are(stack: Stack) -> None:
    with stack.http() as http:
        messages = http.post("/v1/messages", json=body(model="gpt-5"))
        chat = http.post("/v1/chat/completions", json=body(model="gpt-5"))
        asked = {"contents": [{"parts": [{"text": "hello"}]}]}
        gemini = http.post("/v1beta/models/gpt-5:generateContent", json=asked)
    assert messages.json()["error"]["message"].startswith("model: gpt-5; served here: ")
    assert "`gpt-5` does not exist; served here: " in chat.json()["error"]["message"]
    assert "models/gpt-5 is not found for this server; served here: " in gemini.text
    assert all("scripted" in reply.text for reply in (messages, chat, gemini))


def test_an_engine_with_another_secret_is_told_to_the_operator_alone(stack: Stack) -> None:
    stack.engine.secret = "another"

    def readiness() -> str:
        return httpx.get(f"{stack.url}/readyz", timeout=120).text

    eventually(lambda: "HOLDFAST_ENGINE_SECRET, which must equal its ENGINE_SECRET" in readiness())
    with stack.http() as http:
        assert "SECRET" not in http.post("/v1/messages", json=body()).text
