"""The canary: unique keys and texts in real turns, then nobody finds them anywhere.

There is no setting that would log content: what must not be found must never be found. Searched
are the logs of all programs at their most talkative, metrics, error bodies, every table, the bytes
of every file of the database and the journal, the admin API and the dashboard's page.
"""

import base64
import json
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import httpx
import pytest
from anthropic import Anthropic, APIStatusError
from litestar.routes import HTTPRoute
from openai import APIStatusError as OpenAIStatusError
from openai import OpenAI

from gateway.app import create_app
from scripts.stack import ADMIN_KEY, ENGINE_SECRET, MASTER_SECRET, Stack, running_stack
from tests.dashboard.page import page_of
from tests.gateway.process import new_key
from tests.gateway.serving import eventually, make_settings
from tests.isolation.probes import ENGINE, MODEL, client_of

WORKSPACE = "canary-workspace"
LOUD = {"ENGINE_LOG_LEVEL": "debug"}


def canary(kind: str) -> str:
    return f"canary{kind}{uuid4().hex}"


@dataclass
class Cage:
    """Everything that was said in confidence, and everything that the programs gave out."""

    stack: Stack
    data: Path
    logs: Path
    key_id: str
    key: str
    said: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    turns: int = 0

    def say(self, kind: str) -> str:
        self.said[kind] = canary(kind)
        return self.said[kind]

    def http(self, key: str | None = None) -> httpx.Client:
        return client_of(self.stack.gateway, key or self.key)


@contextmanager
def caged(folder: Path) -> Iterator[Cage]:
    logs = folder / "logs"
    data = folder / "data"
    logs.mkdir()
    api_key = canary("configured")
    with running_stack(
        data,
        engine_settings={**ENGINE, **LOUD},
        gateway_settings={"HOLDFAST_LOG_LEVEL": "debug", "HOLDFAST_API_KEY": api_key},
        logs=logs,
    ) as stack:
        key_id, key = new_key(data, WORKSPACE)
        secrets = {"configured key": api_key, "key": key, "admin key": ADMIN_KEY}
        secrets |= {"engine secret": ENGINE_SECRET, "master secret": MASTER_SECRET}
        yield Cage(stack, data, logs, key_id, key, secrets)


def conversation(cage: Cage, dialect: str) -> dict[str, Any]:
    """A turn with a word of its own in every place that takes text."""
    mark = {"cache_control": {"type": "ephemeral"}}
    call = cage.say(f"{dialect}call")
    answer = cage.say(f"{dialect}answer")
    schema = {"type": "object", "properties": {cage.say(f"{dialect}property"): {"type": "string"}}}
    name = cage.say(f"{dialect}tool")
    about = cage.say(f"{dialect}description")
    system = [{"type": "text", "text": f"{cage.say(f'{dialect}system')} " * 30, **mark}]
    common = {"model": MODEL, "max_tokens": 8}
    first = {"role": "user", "content": cage.say(f"{dialect}question")}
    if dialect == "messages":
        use = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {"x": call}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": answer}
        return {
            **common,
            "system": system,
            "tools": [{"name": name, "description": about, "input_schema": schema}],
            "messages": [
                first,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]},
            ],
            "metadata": {"user_id": cage.say("metadata")},
            "stop_sequences": [cage.say("stopmessages")],
        }
    function = {"name": name, "arguments": json.dumps({"x": call})}
    return {
        **common,
        "tools": [
            {
                "type": "function",
                "function": {"name": name, "description": about, "parameters": schema},
            }
        ],
        "messages": [
            {"role": "system", "content": system},
            first,
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": answer},
        ],
        "prompt_cache_key": cage.say("cachekey"),
        "user": cage.say("user"),
        "stop": [cage.say("stopchat")],
    }


def run_turns(cage: Cage) -> None:
    """Both dialects over their own SDKs, streamed and not, cold and again."""
    messages = conversation(cage, "messages")
    chat = conversation(cage, "chat")
    url = cage.stack.gateway
    with (
        Anthropic(base_url=url, api_key=cage.key, timeout=120, max_retries=0) as ours,
        OpenAI(base_url=f"{url}/v1", api_key=cage.key, timeout=120, max_retries=0) as theirs,
    ):
        previous = None
        for _ in range(2):
            extra = {"diagnostics": {"previous_message_id": previous}}
            previous = ours.messages.create(**messages, extra_body=extra).id
            with ours.messages.stream(**messages) as stream:
                stream.get_final_message()
            theirs.chat.completions.create(**chat)
            list(theirs.chat.completions.create(**chat, stream=True))
            theirs.completions.create(model=MODEL, prompt=cage.say("raw"), max_tokens=4)
            cage.turns += 5
        counted = {key: messages[key] for key in ("model", "system", "messages", "tools")}
        ours.messages.count_tokens(**counted)
        for broken in ({"messages": [{"role": cage.say("role"), "content": "x"}]}, {"system": 4}):
            with pytest.raises(APIStatusError) as refused:
                ours.messages.create(**{**messages, **broken})
            cage.errors.append(refused.value.response.text)
        with pytest.raises(OpenAIStatusError) as failed:
            theirs.chat.completions.create(**{**chat, "stop": 3})
        cage.errors.append(failed.value.response.text)


def make_errors(cage: Cage) -> None:
    """Whatever is refused: bodies, keys, paths, broken HTTP."""
    text = cage.say("badtext")
    key = cage.say("wrongkey")
    for body in (
        text,
        f'{{"model": "{text}',
        f'{{"messages": [["{text}"]]}}',
        f'"{text}"',
        "[" * 500,
    ):
        for path in ("/v1/messages", "/v1/chat/completions", "/v1/completions"):
            with cage.http() as client:
                headers = {"content-type": "application/json"}
                reply = client.post(path, content=body, headers=headers)
            assert 400 <= reply.status_code < 500
            cage.errors.append(reply.text)
    with cage.http(key) as client:
        for path in ("/v1/models", "/admin/v1/turns", "/v1/messages"):
            cage.errors.append(client.get(path).text)
    with cage.http() as client:
        long = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": ""}]}
        long["messages"] = [{"role": "user", "content": f"{cage.say('toolong')} " * 4000}]
        reply = client.post("/v1/messages", json=long)
        assert reply.status_code == 400
        cage.errors.append(reply.text)
        cage.turns += 1
        client.get(f"/{cage.say('path')}", params={"q": cage.say("query")})
        client.get("/v1/models", headers={"x-thing": cage.say("header")})
    for url in (cage.stack.gateway, cage.stack.engine):
        at = urlsplit(url)
        with socket.create_connection((at.hostname, at.port), timeout=120) as raw:
            raw.sendall(f"{cage.say('broken' + str(at.port))} \x01\r\n\r\n".encode())
            raw.recv(4096)


def leave_early(cage: Cage) -> None:
    """Clients that go in the midst of their streams."""
    for dialect, path in (("messages", "/v1/messages"), ("chat", "/v1/chat/completions")):
        body = {"model": MODEL, "max_tokens": 400, "stream": True}
        body["messages"] = [{"role": "user", "content": f"{cage.say(f'{dialect}leaving')} " * 10}]
        with cage.http() as client, client.stream("POST", path, json=body) as response:
            next(response.iter_lines())
        cage.turns += 1


def lose_the_engine(cage: Cage) -> None:
    """It is killed while it answers, and then there is none."""
    body = {"model": MODEL, "max_tokens": 4000, "stream": True}
    body["messages"] = [{"role": "user", "content": f"{cage.say('lost')} " * 10}]
    with cage.http() as client:
        with client.stream("POST", "/v1/messages", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            cage.stack.engine_process.kill()
            cage.errors.append("\n".join(list(lines)[-4:]))
        reply = client.post("/v1/messages", json={**body, "stream": False})
        assert reply.status_code >= 500
        cage.errors.append(reply.text)


def admin_answers(cage: Cage) -> dict[str, str]:
    """Everything that the admin API has under a path without parameters, and a comparison."""
    app = create_app(make_settings(cage.data))
    paths = [
        route.path
        for route in app.routes
        if isinstance(route, HTTPRoute)
        and route.path.startswith("/admin")
        and "GET" in route.methods
        and "{" not in route.path
    ]
    assert len(paths) >= 4
    with cage.http(ADMIN_KEY) as admin:
        answers = {path: admin.get(path).text for path in paths}
        turns = [turn["id"] for turn in json.loads(answers["/admin/v1/turns"])]
        path = f"/admin/v1/turns/{turns[0]}/divergence"
        answers[path] = admin.get(path, params={"from": turns[-1]}).text
        for path in ("/openapi.json", "/healthz", "/readyz", "/v1/models"):
            answers[path] = admin.get(path).text
    return answers


def metrics(cage: Cage) -> dict[str, str]:
    urls = {"gateway": cage.stack.gateway, "engine": cage.stack.engine}
    return {
        f"metrics of the {name}": httpx.get(f"{url}/metrics", timeout=120).text
        for name, url in urls.items()
    }


def tables(path: Path) -> str:
    """Every row of every table, bytes as hexadecimal and as text."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        names = [
            name
            for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'")
        ]
        rows = [row for name in names for row in database.execute(f'SELECT * FROM "{name}"')]
    cells = [cell for row in rows for cell in row]
    return "\n".join(
        f"{cell.hex()} {cell.decode(errors='replace')}" if isinstance(cell, bytes) else str(cell)
        for cell in cells
    )


def hits(places: dict[str, bytes], secrets: dict[str, str]) -> list[str]:
    """Where which secret is, plain or in a usual disguise."""
    matches = []
    for kind, secret in secrets.items():
        plain = secret.encode()
        disguises = {plain, plain.hex().encode(), plain[::-1]}
        # Base64 of it within a longer text, wherever that begins: without the ends that may differ.
        disguises |= {base64.b64encode(b" " * shift + plain)[8:-4] for shift in range(3)}
        matches += [
            f"{kind} in {place}"
            for place, content in places.items()
            if any(disguise in content for disguise in disguises)
        ]
    return matches


def recorded(cage: Cage) -> int:
    with cage.http(ADMIN_KEY) as admin:
        return len(admin.get("/admin/v1/turns", params={"limit": 1000}).json())


def test_no_key_and_no_text_is_found_anywhere(tmp_path: Path) -> None:
    with caged(tmp_path) as cage:
        run_turns(cage)
        make_errors(cage)
        leave_early(cage)
        eventually(lambda: recorded(cage) >= cage.turns, seconds=60)
        places = {**metrics(cage), **admin_answers(cage)}
        places["dashboard"] = page_of(cage.stack.gateway, ADMIN_KEY, tmp_path / "logs")
        lose_the_engine(cage)
        time.sleep(1)  # what is written to logs about it
        with cage.http() as client:
            places["metrics of the gateway, later"] = client.get("/metrics").text
    contents = {name: text.encode() for name, text in places.items()}
    for path in [*cage.logs.iterdir(), *(p for p in cage.data.rglob("*") if p.is_file())]:
        contents[str(path.relative_to(tmp_path))] = path.read_bytes()
    databases = [path for path in cage.data.rglob("*.db")]
    contents |= {f"tables of {path.name}": tables(path).encode() for path in databases}
    contents |= {f"error {index}": text.encode() for index, text in enumerate(cage.errors)}
    assert_searched(cage, contents)
    assert hits(contents, cage.said) == []


def assert_searched(cage: Cage, contents: dict[str, bytes]) -> None:
    """What was searched is what it should be: known words are where they belong."""
    assert len(cage.said) > 30 and len(cage.errors) > 20
    assert {"logs/gateway.log", "logs/engine.log", "logs/dashboard.log"} <= set(contents)
    assert b'"event": "started"' in contents["logs/gateway.log"]
    assert WORKSPACE.encode() in contents["/admin/v1/turns"]
    assert b"holdfast_gateway_turns_total" in contents["metrics of the gateway"]
    assert b"holdfast_engine_requests_total" in contents["metrics of the engine"]
    assert cage.key_id.encode() in contents["tables of ledger.db"]
    journal = [name for name in contents if "/journal/" in name]
    assert any(cage.key_id.encode() in contents[name] for name in journal)
    disguised = base64.b64encode(b"xx" + cage.key.encode() + b"tail")
    assert hits({"a place": b"[" + disguised + b"]"}, {"key": cage.key}) == ["key in a place"]
