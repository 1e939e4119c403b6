"""POST /admin/v1/advise and `python -m gateway advise`, of turns in a ledger and of pasted text."""

import json
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.base.record import TurnRecord
from gateway.cli.main import main
from tests.gateway.admin_client import Admin
from tests.gateway.advice.faulty import FAULTY_BODIES
from tests.gateway.advice.shapes import Author
from tests.gateway.advice.weeks import RULES as RULES
from tests.gateway.advice.weeks import turn
from tests.gateway.serving import fill, make_settings, serve_gateway

DAY = datetime(2026, 11, 10, tzinfo=UTC)
DAY_MS = int(DAY.timestamp() * 1000)
RANGE = {"since_ms": DAY_MS, "until_ms": DAY_MS + 3_600_000}


def record(number: int, system: str, workspace: str = "team-a") -> TurnRecord:
    return turn(workspace, number, system, DAY)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("advise")
    turns = [record(n, RULES) for n in range(10)]
    turns += [record(n, f"request {n}\n{RULES}", "team-b") for n in range(10)]
    turns.append(record(30, RULES))
    fill(make_settings(data), turns)
    return data


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[Admin]:
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield Admin(url)


def test_a_range_is_advised_by_key_and_model(gateway: Admin) -> None:
    report = gateway.post("advise", RANGE)
    assert report["num_turns"] == 21 and not report["is_cut"]
    by = {stream["workspace"]: stream for stream in report["streams"]}
    sound = by["team-a"]
    faulty = by["team-b"]
    assert sound["verdict"] == "mark" and sound["findings"] == []
    # Ten in a row, then one after 21 minutes: 2 and ten reads cost less than 2 * 1.25 and nine.
    assert sound["markers"] == [{"place": "system", "ttl": "1h"}]
    assert sound["policy"] == {"auto_cache": "prefix", "auto_cache_ttl": "1h"}
    size = sound["shared_tokens"]
    assert sound["saves"]["multiples"] == round(size * (11 - 2 - 10 * 0.1), 1)
    (fault,) = faulty["findings"]
    assert (fault["kind"], fault["path"], fault["num_turns"]) == ("nonce", "system.0", 9)
    assert set(fault["turns"]) <= {f"msg_team-b_{n:02}" for n in range(10)}
    assert faulty["verdict"] == "fix" and faulty["saves"]["multiples"] > 0
    newest = gateway.post("advise", {**RANGE, "max_turns": 5})
    assert newest["num_turns"] == 5 and newest["is_cut"]
    empty = gateway.post("advise", {"since_ms": 0, "until_ms": 1000})
    assert empty["streams"] == [] and "nothing to advise on" in empty["text"]


@pytest.mark.parametrize(
    "body, named",
    [
        ({"since_ms": 5, "until_ms": 5}, "since_ms"),
        ({"max_turns": 60_001}, "max_turns"),
        ({"requests": ["{}"] * 21}, "requests"),
        ({"requests": ["no json"]}, "requests[0]: neither a JSON object"),
        ({"requests": [{"messages": []}]}, "requests[0]: messages"),
        ({"requests": ["{}", "{}"], "nope": 1}, "nope: unknown field"),
        ({"requests": ["x" * 1_000_001]}, "more than 1,000,000 characters"),
        ({"dialect": "morse"}, "dialect"),
    ],
)
def test_bad_input_is_told_by_its_field(gateway: Admin, body: Any, named: str) -> None:
    assert named in gateway.post("advise", body, 400)["error"]["message"]


def test_a_key_of_a_workspace_is_advised_on_its_own_turns(gateway: Admin) -> None:
    gateway.workspace("team-a")
    workspace_admin = Admin(gateway.url, gateway.make_key("team-a", scope="read_only")[1])
    report = workspace_admin.post("advise", RANGE)
    assert {stream["workspace"] for stream in report["streams"]} == {"team-a"}
    workspace_admin.post("advise", {**RANGE, "workspace": "team-b"}, 403)


BODIES: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "system": RULES, "messages": [{"role": "user", "content": "x"}]},
    "chat": {
        "model": "m",
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": "x"}],
    },
    "responses": {"model": "m", "instructions": RULES, "input": "x"},
    "gemini": {
        "systemInstruction": {"parts": [{"text": RULES}]},
        "contents": [{"role": "user", "parts": [{"text": "x"}]}],
    },
}


def advised(gateway: Admin, request: Any) -> Any:
    (advice,) = gateway.post("advise", {"requests": [request]})["requests"]
    return advice


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("dialect", BODIES)
def test_a_pasted_request_of_any_dialect_is_advised(
    gateway: Admin, dialect: str, as_text: bool
) -> None:
    body = BODIES[dialect]
    advice = advised(gateway, f"curl http://x -d '{json.dumps(body)}'" if as_text else body)
    assert advice["dialect"] == dialect
    assert [finding["kind"] for finding in advice["findings"]] == ["unmarked"]
    if dialect in ("messages", "chat"):
        assert json.dumps(advice["marked"]).count("cache_control") == 1
        again = advised(gateway, advice["marked"])
        assert again["findings"] == []
        assert again["blocks"][0]["marker"] == "5m"
    else:
        assert advice["marked"] is None


def test_an_id_in_a_system_prompt_and_markers_that_break_a_rule_are_told(gateway: Admin) -> None:
    system = f"Request 0c9cf8a2-6f0d-4e8b-9d53-0d7f2f4a1b11.\n{RULES}"
    advice = advised(gateway, {**BODIES["messages"], "system": system})
    suspect = next(finding for finding in advice["findings"] if finding["kind"] == "suspect")
    assert suspect["path"] == "system.0" and "an id" in suspect["text"]
    mark = {"type": "ephemeral"}
    blocks = [{"type": "text", "text": f"b{n}", "cache_control": mark} for n in range(5)]
    advice = advised(gateway, {"model": "m", "messages": [{"role": "user", "content": blocks}]})
    assert advice["findings"][0]["kind"] == "invalid" and "Found 5" in advice["findings"][0]["text"]


@pytest.mark.parametrize("shape", FAULTY_BODIES)
def test_a_fault_of_pasted_requests_is_named_as_its_dialect_names_the_block(
    gateway: Admin, shape: str
) -> None:
    planted = FAULTY_BODIES[shape]
    bodies = planted.make(Author(random.Random(shape)))
    (stream,) = gateway.post("advise", {"requests": bodies, "min_tokens": 64})["streams"]
    findings = [finding for finding in stream["findings"] if finding["kind"] in planted.kinds]
    assert findings, stream["findings"]
    # The path leads to the block in the body that was sent.
    block: Any = bodies[int(re.findall(r"\d+", findings[0]["turns"][0])[0])]
    for step in re.findall(r"\w+", findings[0]["path"]):
        if isinstance(block, str):
            # A text alone is the one block of its field.
            assert step in ("0", "content")
        else:
            block = block[int(step) if step.isdigit() else step]
    assert block


def test_the_command_says_the_same(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", make_settings(data).ledger_url)
    assert main(["advise", "--since", DAY.isoformat(), "--until", "2026-11-11"]) == 0
    output = capsys.readouterr().out
    for words in ("Mark system (1h), and nothing else", "system.0", "msg_team-b_"):
        assert words in output
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODIES["messages"]))
    assert main(["advise", str(path)]) == 0
    assert "Nothing is marked" in capsys.readouterr().out
    path.write_text("?")
    assert main(["advise", str(path)]) == 1
    assert "requests[0]" in capsys.readouterr().err
