"""POST /admin/v1/advise and `python -m gateway advise`, of turns in a ledger and of pasted text."""

import asyncio
import json
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.protocol import Message, Prompt, TextPart
from gateway.base.record import TurnRecord
from gateway.cli.main import main
from gateway.cli.migrate import migrate
from gateway.journal.charge import charge
from gateway.ledger.database import Ledger, with_ledger
from gateway.prices.files import load_prices
from tests.gateway.advice.bodies_faulty import FAULTY_BODIES
from tests.gateway.advice.bodies_sound import SOUND_BODIES
from tests.gateway.advice.shapes import Author, Sent, fingerprint
from tests.gateway.serving import ADMIN_KEY, make_settings, serve_gateway

DAY = datetime(2026, 11, 10, tzinfo=UTC)
DAY_MS = int(DAY.timestamp() * 1000)
RULES = "a rule to follow\n" * 600


def record(number: int, system: str, workspace: str = "team-a") -> TurnRecord:
    prompt = Prompt([Message("user", [TextPart(f"q {number}")])], system=[TextPart(system)])
    packed = fingerprint(Sent(0, prompt))
    size = len(system) // 4
    made = TurnRecord(
        id=f"msg_{workspace}_{number}",
        instance="i",
        workspace=workspace,
        key_id="key_1",
        model="m",
        engine="engine-0",
        stream=False,
        opened_at=DAY + timedelta(minutes=number),
        outcome="stop",
        input_tokens=size,
        computed_tokens=size,
        output_tokens=1,
        first_token_seconds=0.1,
        prefill_seconds=size / 10_000,
        dialect="openai",
        fingerprint=packed,
    )
    charge(made, load_prices().find("reference", DAY.date()))
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("advise")
    settings = make_settings(data)
    migrate(settings)
    turns = [record(n, RULES) for n in range(10)]
    turns += [record(n, f"request {n}\n{RULES}", "team-b") for n in range(10)]
    turns.append(record(30, RULES))

    async def fill(ledger: Ledger) -> None:
        await ledger.insert_turns(turns)

    asyncio.run(with_ledger(settings.ledger_url, fill))
    return data


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[str]:
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield url


def ask(url: str, body: Any, key: str = ADMIN_KEY, status: int = 200) -> Any:
    headers = {"x-api-key": key}
    reply = httpx.post(f"{url}/admin/v1/advise", json=body, headers=headers, timeout=120)
    assert reply.status_code == status, reply.text
    return reply.json()


RANGE = {"since_ms": DAY_MS, "until_ms": DAY_MS + 3_600_000}


def test_a_range_is_advised_by_key_and_model(gateway: str) -> None:
    found = ask(gateway, RANGE)
    assert found["num_turns"] == 21 and not found["is_cut"]
    by = {stream["workspace"]: stream for stream in found["streams"]}
    sound, faulty = by["team-a"], by["team-b"]
    assert sound["verdict"] == "mark" and sound["findings"] == []
    # Ten in a row, then one after 21 minutes: 2 and ten reads cost less than 2 * 1.25 and nine.
    assert sound["markers"] == [{"place": "system", "ttl": "1h"}]
    assert sound["policy"] == {"auto_cache": "prefix", "auto_cache_ttl": "1h"}
    size = sound["shared_tokens"]
    assert sound["saves"]["multiples"] == round(size * (11 - 2 - 10 * 0.1), 1)
    (fault,) = faulty["findings"]
    assert (fault["kind"], fault["path"], fault["num_turns"]) == ("nonce", "system.0", 9)
    assert set(fault["turns"]) <= {f"msg_team-b_{n}" for n in range(10)}
    assert faulty["verdict"] == "leave"


def test_an_empty_range_says_so(gateway: str) -> None:
    found = ask(gateway, {"since_ms": 0, "until_ms": 1000})
    assert found["streams"] == [] and "nothing to advise on" in found["text"]


def test_the_newest_turns_are_taken_where_there_are_too_many(gateway: str) -> None:
    found = ask(gateway, {**RANGE, "max_turns": 5})
    assert found["num_turns"] == 5 and found["is_cut"]


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
def test_bad_input_is_told_by_its_field(gateway: str, body: Any, named: str) -> None:
    assert named in ask(gateway, body, status=400)["error"]["message"]


def test_a_key_of_a_workspace_is_advised_on_its_own_turns(gateway: str) -> None:
    headers = {"x-api-key": ADMIN_KEY}
    post = httpx.post(
        f"{gateway}/admin/v1/workspaces", json={"id": "team-a"}, headers=headers, timeout=120
    )
    assert post.status_code == 200, post.text
    made = httpx.post(
        f"{gateway}/admin/v1/keys",
        json={"workspace": "team-a", "name": "k", "scope": "read_only"},
        headers=headers,
        timeout=120,
    ).json()
    found = ask(gateway, RANGE, made["key"])
    assert {stream["workspace"] for stream in found["streams"]} == {"team-a"}
    ask(gateway, {**RANGE, "workspace": "team-b"}, made["key"], 403)
    ask(gateway, RANGE, "unknown-key", 401)


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


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("dialect", BODIES)
def test_a_pasted_request_of_any_dialect_is_advised(
    gateway: str, dialect: str, as_text: bool
) -> None:
    body = BODIES[dialect]
    given = f"curl http://x -d '{json.dumps(body)}'" if as_text else body
    (found,) = ask(gateway, {"requests": [given]})["requests"]
    assert found["dialect"] == dialect
    assert [each["kind"] for each in found["findings"]] == ["unmarked"]
    if dialect in ("messages", "chat"):
        assert json.dumps(found["marked"]).count("cache_control") == 1
        (again,) = ask(gateway, {"requests": [found["marked"]]})["requests"]
        assert again["findings"] == []
        assert again["blocks"][0]["marker"] == "5m"
    else:
        assert found["marked"] is None


def test_an_id_in_a_pasted_system_prompt_is_suspected(gateway: str) -> None:
    system = f"Request 0c9cf8a2-6f0d-4e8b-9d53-0d7f2f4a1b11.\n{RULES}"
    body = {**BODIES["messages"], "system": system}
    (found,) = ask(gateway, {"requests": [body]})["requests"]
    suspect = next(each for each in found["findings"] if each["kind"] == "suspect")
    assert suspect["path"] == "system.0" and "an id" in suspect["text"]


def test_markers_that_break_a_rule_are_told(gateway: str) -> None:
    mark = {"type": "ephemeral"}
    blocks = [{"type": "text", "text": f"b{n}", "cache_control": mark} for n in range(5)]
    body = {"model": "m", "messages": [{"role": "user", "content": blocks}]}
    (found,) = ask(gateway, {"requests": [body]})["requests"]
    assert found["findings"][0]["kind"] == "invalid" and "Found 5" in found["findings"][0]["text"]


def test_two_pasted_requests_are_compared(gateway: str) -> None:
    tools = [
        {
            "name": f"tool_{n}",
            "description": "what it does " * 40,
            "input_schema": {"type": "object"},
        }
        for n in range(4)
    ]
    bodies = [{**BODIES["messages"], "tools": order} for order in (tools, tools[::-1])]
    found = ask(gateway, {"requests": bodies})
    (stream,) = found["streams"]
    assert [(each["kind"], each["path"]) for each in stream["findings"]] == [
        ("tool_order", "tools")
    ]
    assert stream["findings"][0]["turns"] == ["requests[1]"]


@pytest.mark.parametrize("shape", FAULTY_BODIES)
def test_a_fault_of_pasted_requests_is_named_as_its_dialect_names_the_block(
    gateway: str, shape: str
) -> None:
    bodies, expected = FAULTY_BODIES[shape](Author(random.Random(shape)))
    (stream,) = ask(gateway, {"requests": bodies, "min_tokens": 64})["streams"]
    found = [each for each in stream["findings"] if each["kind"] in expected.kinds]
    assert found, stream["findings"]
    body = bodies[int(found[0]["turns"][0].removeprefix("requests[").removesuffix("]"))]
    # The path leads to the block in the body that was sent.
    block: Any = body
    for step in re.findall(r"\w+", found[0]["path"]):
        if isinstance(block, str):
            # A text alone is the one block of its field.
            assert step in ("0", "content")
        else:
            block = block[int(step) if step.isdigit() else step]
    assert block


@pytest.mark.parametrize("shape", SOUND_BODIES)
def test_sound_pasted_requests_have_no_finding(gateway: str, shape: str) -> None:
    bodies = SOUND_BODIES[shape](Author(random.Random(shape)))
    (stream,) = ask(gateway, {"requests": bodies, "min_tokens": 64})["streams"]
    # `moving_markers` marks; the others leave nothing to say about markers either.
    assert [each["kind"] for each in stream["findings"]] == []


def test_the_command_says_the_same(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOLDFAST_DATABASE_URL", make_settings(data).ledger_url)
    assert main(["advise", "--since", DAY.isoformat(), "--until", "2026-11-11"]) == 0
    said = capsys.readouterr().out
    assert (
        "Mark system (1h), and nothing else" in said
        and "system.0" in said
        and "msg_team-b_" in said
    )
    path = tmp_path / "request.json"
    path.write_text(json.dumps(BODIES["messages"]))
    assert main(["advise", str(path)]) == 0
    assert "Nothing is marked" in capsys.readouterr().out
    path.write_text("?")
    assert main(["advise", str(path)]) == 1
    assert "requests[0]" in capsys.readouterr().err
