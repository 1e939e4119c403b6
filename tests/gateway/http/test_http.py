"""Statuses, envelopes, keys and probes: everything around a turn."""

from typing import Any

import httpx
import pytest

from gateway.http.refusals import MAX_OF_WORKSPACE, MAX_WORKSPACES, Refusals
from gateway.structs.usage import Refusal
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import ADMIN_KEY, API_KEY, eventually


def check_envelope(reply: httpx.Response, status: int, kind: str) -> str:
    assert reply.status_code == status, reply.text
    envelope = reply.json()
    assert envelope["type"] == "error" and envelope["error"]["type"] == kind
    assert envelope["request_id"] == reply.headers["request-id"]
    message: str = envelope["error"]["message"]
    return message


JSON = "application/json"


@pytest.mark.parametrize(
    "request_line, headers, content, status, kind",
    [
        ("GET /nowhere", {}, b"", 404, "not_found_error"),
        ("GET /v1/messages", {}, b"", 405, "invalid_request_error"),
        ("POST /v1/messages", {"content-type": "text/plain"}, b"{}", 415, "invalid_request_error"),
        ("POST /v1/messages", {}, b"{}", 415, "invalid_request_error"),
        (
            "POST /v1/messages",
            {"content-type": f"{JSON}; charset=utf-16"},
            *(b"{}", 415, "invalid_request_error"),
        ),
        (
            "POST /v1/messages",
            {"content-type": JSON, "content-encoding": "gzip"},
            *(b"{}", 415, "invalid_request_error"),
        ),
        (
            "POST /v1/messages",
            {"content-type": JSON},
            *(b"[" * 100_000, 400, "invalid_request_error"),
        ),
        ("GET /v1/models/none", {}, b"", 404, "not_found_error"),
        ("GET /v1/models?limit=0", {}, b"", 400, "invalid_request_error"),
        ("GET /admin/v1/engines", {}, b"", 403, "permission_error"),
    ],
)
def test_every_failure_has_the_one_envelope(
    stack: Stack, request_line: str, headers: dict[str, str], content: bytes, status: int, kind: str
) -> None:
    method, path = request_line.split()
    with stack.http() as http:
        reply = http.request(method, path, headers=headers, content=content)
    check_envelope(reply, status, kind)


@pytest.mark.parametrize(
    "path, status", [("/healthz", 200), ("/v1/models", 200), ("/v1/messages", 405), ("/none", 404)]
)
def test_head_has_gets_status_and_headers_and_no_body(stack: Stack, path: str, status: int) -> None:
    with stack.http() as http:
        head = http.head(path)
        get = http.get(path)
        assert (head.status_code, get.status_code) == (status, status)
        assert head.content == b"" and get.content
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers.get("allow") == get.headers.get("allow")
        # The connection is still good for the next request.
        assert http.get("/healthz").status_code == 200
        assert http.head("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401
        assert http.head("/").status_code == 200 and http.get("/").status_code == 404


def test_what_is_no_key_is_told(stack: Stack) -> None:
    def message(headers: dict[str, str]) -> str:
        headers = {"anthropic-version": "2023-06-01", **headers}
        url = f"{stack.url}/v1/messages"
        reply = httpx.post(url, json=body(), headers=headers, timeout=120)
        return check_envelope(reply, 401, "authentication_error")

    assert message({}) == "x-api-key header is required"
    for wrong in ("x", API_KEY + "x", ADMIN_KEY + "x"):
        assert message({"x-api-key": wrong}) == "invalid x-api-key"
    assert "this is the admin key" in message({"x-api-key": ADMIN_KEY})
    message({"authorization": "Basic abc"})


@pytest.mark.parametrize("name", ["x-api-key", "authorization", "x-goog-api-key"])
def test_two_keys_in_one_header_are_refused(stack: Stack, name: str) -> None:
    value = f"Bearer {API_KEY}" if name == "authorization" else API_KEY
    path = "/v1beta/models" if name == "x-goog-api-key" else "/v1/models"
    with httpx.Client(base_url=stack.url, timeout=120) as http:
        for second_key, status in ((value, 200), (value + "x", 400)):
            headers = [(name, value), (name, second_key), ("anthropic-version", "2023-06-01")]
            reply = http.get(path, headers=headers)
            assert reply.status_code == status, reply.text
    assert f"{name}: two different values" in reply.text


@pytest.mark.parametrize(
    "path, headers, id_header",
    [
        ("/v1/models", {"anthropic-version": "2023-06-01", "x-api-key": API_KEY}, "request-id"),
        ("/v1/models", {"authorization": f"Bearer {API_KEY}"}, "x-request-id"),
        ("/v1/messages/batches", {"x-api-key": API_KEY}, "request-id"),
    ],
)
def test_a_list_has_no_page_between_two_cursors(
    stack: Stack, path: str, headers: dict[str, str], id_header: str
) -> None:
    with httpx.Client(base_url=stack.url, timeout=120) as http:
        reply = http.get(path, params={"after_id": "a", "before_id": "b"}, headers=headers)
    assert reply.status_code == 400 and id_header in reply.headers
    assert reply.json()["error"]["message"] == "after_id: excludes before_id"


@pytest.mark.parametrize("path", ["/v1beta/cachedContents", "/v1beta/models"])
def test_a_made_up_page_token_is_refused(stack: Stack, path: str) -> None:
    reply = stack.get(path, params={"pageToken": "zzz"})
    assert reply.status_code == 400 and "pageToken" in reply.json()["error"]["message"]


def test_readiness_follows_the_engine_and_passes_its_progress_on(stack: Stack) -> None:
    def get(path: str) -> tuple[int, Any]:
        reply = httpx.get(f"{stack.url}{path}", timeout=120)
        return reply.status_code, reply.json()

    status, ready = get("/readyz")
    assert status == 200 and ready["engines"][0]["model"] == "scripted"
    stack.engine.is_ready = False
    eventually(lambda: get("/readyz")[0] == 503)
    for path in ("/readyz", "/health"):  # the latter as vLLM names it, for GuideLLM
        status, health = get(path)
        assert (status, health["engines"][0]["status"]) == (503, "starting")
    assert get("/readyz")[1]["engines"][0]["detail"]["progress"] == 0.5
    assert get("/healthz")[0] == 200
    check_envelope(stack.post("/v1/messages", json=body()), 529, "overloaded_error")


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/v1/v1/messages", "not found: /v1/v1/messages; did you mean /v1/messages? Anthropic"),
        ("/chat/completions", "not found: /chat/completions; did you mean /v1/chat/completions? A"),
        ("/v1/mesages", "not found: /v1/mesages; did you mean /v1/messages?"),
        ("/models/x:generateContent", "did you mean /v1beta/models/MODEL:generateContent?"),
        ("/nowhere", "not found: /nowhere"),
        ("/v1/embeddings", "not found: /v1/embeddings; this server makes no embeddings"),
        ("/embeddings", "not found: /embeddings; this server makes no embeddings"),
        ("/v1/files/file_1/content", "this server keeps no files"),
        ("/interactions", "not found: /interactions; did you mean /v1/interactions?"),
        ("/", "described at /openapi.json"),
        ("/" + "a" * 5000, "not found: /" + "a" * 99),
    ],
)
def test_a_path_not_served_is_told_with_the_nearest_one(
    stack: Stack, path: str, nearest: str
) -> None:
    reply = stack.post(path, json={})
    assert reply.status_code == 404
    message = reply.json()["error"]["message"]
    assert nearest in message and len(message) < 300


def test_a_model_that_nothing_serves_is_told_with_those_that_are(stack: Stack) -> None:
    messages = stack.post("/v1/messages", json=body(model="gpt-5"))
    chat = stack.post("/v1/chat/completions", json=body(model="gpt-5"))
    contents = {"contents": [{"parts": [{"text": "hello"}]}]}
    gemini = stack.post("/v1beta/models/gpt-5:generateContent", json=contents)
    assert messages.json()["error"]["message"].startswith("model: gpt-5; served here: ")
    assert "`gpt-5` does not exist; served here: " in chat.json()["error"]["message"]
    assert "models/gpt-5 is not found for this server; served here: " in gemini.text
    assert all("scripted" in reply.text for reply in (messages, chat, gemini))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"secret": "another"}, "HOLDFAST_ENGINE_SECRET, which must equal its ENGINE_SECRET"),
        ({"is_mounted": False}, "VLLM_PLUGINS must name holdfast"),
    ],
)
def test_an_engine_that_is_set_wrong_is_told_to_the_operator_alone(
    stack: Stack, wrong: dict[str, Any], problem: str
) -> None:
    for name, value in wrong.items():
        setattr(stack.engine, name, value)
    eventually(lambda: problem in httpx.get(f"{stack.url}/readyz", timeout=120).text)
    reply = stack.post("/v1/messages", json=body())
    assert reply.status_code == 529 and "SECRET" not in reply.text and "VLLM" not in reply.text


NO: dict[str, Any] = {"status": 400, "type": "t", "message": "no", "path": "/"}
NO |= dict.fromkeys(("user_agent", "key", "limit"))


def refusal(at_ms: int, workspace: str) -> Refusal:
    return Refusal(at_ms=at_ms, workspace=workspace, request_id=f"req_{at_ms}", **NO)


def test_one_that_is_refused_all_day_hides_nobody_else_and_memory_is_bounded() -> None:
    refusals = Refusals()
    refusals.keep(refusal(0, "quiet"))
    for at_ms in range(1, 2 * MAX_OF_WORKSPACE):
        refusals.keep(refusal(at_ms, "loud"))
    assert len(refusals.newest("loud", None, 1000)) == MAX_OF_WORKSPACE
    assert [entry.at_ms for entry in refusals.newest("quiet", None, 10)] == [0]
    for number in range(MAX_WORKSPACES + 5):
        refusals.keep(refusal(number, f"workspace-{number}"))
    assert len(refusals.newest(None, None, 100_000)) == MAX_WORKSPACES
    assert refusals.newest("workspace-0", None, 10) == refusals.newest("quiet", None, 10) == []
