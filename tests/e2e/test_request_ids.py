"""One id from the response to the error, both programs' log lines, the ledger and the admin API."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.backends.synthetic import CONTEXT_TOKENS
from scripts.stack import API_KEY, Stack, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

# Four bytes are a token here. Only the engine knows that this is too long with what stands around.
TOO_LONG = ("hush " * CONTEXT_TOKENS)[: 4 * (CONTEXT_TOKENS - 1)]
SECRET = "The heron counts forty two stones"


@dataclass(frozen=True)
class Served:
    stack: Stack
    logs: Path

    def lines(self, program: str, request_id: str) -> list[dict[str, Any]]:
        """The program's log lines that have the id."""
        text = (self.logs / f"{program}.log").read_text("utf-8")
        parsed = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [line for line in parsed if line.get("request_id") == request_id]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    engine = {"ENGINE_MIN_CACHE_TOKENS": "16", "ENGINE_LOG_LEVEL": "debug"}
    gateway = {"HOLDFAST_ACCESS_LOG": "true"}
    data = tmp_path_factory.mktemp("data")
    with running_stack(data, "synthetic", engine, gateway, logs) as stack:
        yield Served(stack, logs)


def requests(text: str) -> dict[str, dict[str, Any]]:
    """A body for each path that runs turns."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/messages": {"model": "synthetic", "max_tokens": 4, "messages": messages},
        "/v1/chat/completions": {"model": "synthetic", "max_tokens": 4, "messages": messages},
        "/v1/completions": {"model": "synthetic", "max_tokens": 4, "prompt": text + "hush"},
        "/v1/responses": {"model": "synthetic", "max_output_tokens": 16, "input": text},
        "/v1beta/models/synthetic:generateContent": {
            "contents": [{"role": "user", "parts": [{"text": text}]}],
            "generationConfig": {"maxOutputTokens": 4},
        },
    }


def post(served: Served, path: str, text: str) -> tuple[httpx.Response, str]:
    """The reply, and the request's id in its header."""
    headers = {"anthropic-version": "2023-06-01", "x-api-key": API_KEY, "x-goog-api-key": API_KEY}
    url = f"{served.stack.gateway}{path}"
    reply = httpx.post(url, json=requests(text)[path], headers=headers, timeout=120)
    request_id = reply.headers.get("request-id") or reply.headers["x-request-id"]
    assert request_id.startswith("req_")
    return reply, request_id


def row(served: Served, request_id: str) -> dict[str, Any]:
    """The ledger's row, found by the request's id as the dashboard's search asks for it."""
    turn = Admin(served.stack.gateway).recorded(request_id)
    assert turn["http_request_id"] == request_id
    return turn


@pytest.mark.parametrize("path", requests(""))
def test_an_answers_id_is_in_both_programs_logs_and_the_ledger(served: Served, path: str) -> None:
    reply, request_id = post(served, path, SECRET)
    assert reply.status_code == 200, reply.text
    turn = row(served, request_id)
    assert turn["status"] == 200 and turn["error"] is None
    eventually(lambda: len(served.lines("gateway", request_id)) >= 2, 60)
    by_event = {line["event"]: line for line in served.lines("gateway", request_id)}
    assert by_event["turn"]["turn"] == turn["id"]
    answer = by_event["response"]
    assert (answer["method"], answer["status"], answer["workspace"]) == ("POST", 200, "default")
    assert answer["route"].startswith("/v1") and answer["seconds"] > 0
    assert answer["bytes"] == len(reply.content)
    eventually(lambda: bool(served.lines("engine", request_id)), 60)
    [call] = served.lines("engine", request_id)
    assert (call["event"], call["route"], call["status"]) == ("call", "/v1/generate", 200)


@pytest.mark.parametrize("path", requests(""))
def test_the_id_of_an_engines_refusal_is_everywhere_too(served: Served, path: str) -> None:
    reply, request_id = post(served, path, TOO_LONG)
    assert reply.status_code == 400, reply.text
    assert request_id in reply.text
    turn = row(served, request_id)
    assert turn["status"] == 400 and "too long" in turn["error"]
    eventually(lambda: len(served.lines("engine", request_id)) == 2, 60)
    refused, call = served.lines("engine", request_id)
    assert (refused["event"], refused["code"]) == ("call refused", "prompt_too_long")
    assert (call["event"], call["status"]) == ("call", 400)
    eventually(lambda: len(served.lines("gateway", request_id)) >= 2, 60)
    statuses = {line["status"] for line in served.lines("gateway", request_id)}
    assert statuses == {400}


def test_the_id_of_a_broken_request_is_in_the_access_log(served: Served) -> None:
    headers = {f"x-{number}": "v" for number in range(200)}
    reply = httpx.post(f"{served.stack.gateway}/v1/messages", headers=headers, timeout=120)
    request_id = reply.headers["request-id"]
    assert reply.status_code == 431 and request_id in reply.text
    eventually(lambda: bool(served.lines("gateway", request_id)), 60)
    [line] = served.lines("gateway", request_id)
    assert (line["event"], line["reason"]) == ("refused_connection", "head_too_large")


@pytest.mark.parametrize("header", [b"x" * 65, b'"};{"event":"forged', b"a\tb", b""])
def test_an_engine_takes_no_id_that_could_be_more_than_one(served: Served, header: bytes) -> None:
    """Only a program that has the engine's secret could send one."""
    before = (served.logs / "engine.log").read_bytes()
    with served.stack.engine_client() as engine:
        reply = engine.post("/v1/generate", content=b"{}", headers={b"x-request-id": header})
    assert reply.status_code == 400
    eventually(lambda: len((served.logs / "engine.log").read_bytes()) > len(before), 60)
    added = (served.logs / "engine.log").read_bytes()[len(before) :]
    lines = [json.loads(line) for line in added.splitlines()]
    assert [line["event"] for line in lines] == ["call refused"]
    assert "request_id" not in lines[0]


def test_no_line_of_either_program_has_a_prompt_or_a_key(served: Served) -> None:
    post(served, "/v1/messages", SECRET)
    for program in ("gateway", "engine"):
        text = (served.logs / f"{program}.log").read_text("utf-8")
        assert text and not [word for word in (SECRET, "hush hush", API_KEY) if word in text]
