"""POST /admin/v1/plan and `python -m gateway plan`, of a ledger, a trace and made-up traffic."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli.main import main
from gateway.planning import traffic
from scripts.stack import family
from tests.gateway.admin.test_advise import RANGE, RULES, data
from tests.gateway.admin_client import Admin
from tests.gateway.serving import ADMIN_KEY, eventually, serve_gateway

__all__ = ["data"]
LINE = '{"timestamp": %d, "input_length": %d, "output_length": 4, "hash_ids": %s}'


def trace(num_requests: int, num_blocks: int) -> str:
    """Requests of a conversation, with as many blocks of 512 tokens each."""
    ids = list(range(num_blocks))
    lines = (LINE % (n * 60_000, 512 * num_blocks, ids) for n in range(num_requests))
    return "\n".join(lines)


SMALL = {"trace": trace(6, 2), "device_tokens": 163_840}
LONG = {"trace": trace(8_000, 100), "device_tokens": 163_840}
HEADERS = {"x-api-key": ADMIN_KEY}


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[str]:
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield url


def post(url: str, body: Any, path: str = "plan", key: str = ADMIN_KEY) -> httpx.Response:
    headers = {"x-api-key": key}
    return httpx.post(f"{url}/admin/v1/{path}", json=body, headers=headers, timeout=180)


def ask(url: str, body: Any, status: int = 200, key: str = ADMIN_KEY, path: str = "plan") -> Any:
    """The answer. A plan that an earlier client left may hold the key's place for a moment."""
    replies: list[httpx.Response] = []

    def is_answered() -> bool:
        replies.append(post(url, body, path, key))
        return replies[-1].status_code != 429

    eventually(is_answered)
    assert replies[-1].status_code == status, replies[-1].text
    return replies[-1].json()


@contextmanager
def planning(url: str) -> Iterator[None]:
    """A client that has begun to read of a long plan, and leaves."""
    path = f"{url}/admin/v1/plan/progress"
    with httpx.stream("POST", path, json=LONG, headers=HEADERS, timeout=180) as reply:
        lines = reply.iter_lines()
        assert reply.status_code == 200 and next(lines)
        yield


def planners() -> set[int]:
    """The processes of plans that run now for gateways of this process, not of other tests."""
    pids = set()
    for pid in family(os.getpid()):
        entry = Path("/proc", str(pid))
        try:
            line = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if b"\x00-m\x00gateway.planner\x00" in line and state != "Z":
            pids.add(pid)
    return pids


def test_the_turns_of_a_range_are_planned_with_their_measured_prefill(gateway: str) -> None:
    ask(gateway, RANGE, status=400)  # No engine answers here, so its memory is not known.
    body = {**RANGE, "device_tokens": 163_840}
    plan = ask(gateway, body)
    assert plan["turns"] == 21 and plan["simulated"] is True
    assert plan["prompt_tokens"] > 20 * len(RULES) // 4
    assert "takes 100.0 µs" in plan["assumptions"][0]
    assert "the quickest quarter of 21 turns" in plan["assumptions"][0]
    # Ten and eleven equal system prompts, nothing marked: all but the first are automatic.
    assert plan["whole"]["hit_rate"] == 0 and plan["whole"]["reuse_rate"] > 0.3
    assert plan["whole"]["promise_kept"] is None
    admin = Admin(gateway)
    admin.workspace("team-a")
    key = admin.make_key("team-a", scope="read_only")[1]
    assert ask(gateway, body, key=key)["turns"] == 11, "of its own workspace alone"
    ask(gateway, {**body, "workspace": "team-b"}, key=key, status=403)


def test_a_plan_of_the_newest_turns_alone_says_so(
    gateway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {**RANGE, "device_tokens": 163_840}
    assert ask(gateway, body)["warnings"] == []
    monkeypatch.setattr(traffic, "MAX_TURNS", 5)
    plan = ask(gateway, body)
    assert plan["turns"] == 5
    (warning,) = plan["warnings"]
    assert warning.startswith("The newest 5 requests of the range are planned.")


@pytest.mark.parametrize("path", ["plan", "plan/progress"])
def test_what_is_wrong_is_named(gateway: str, path: str) -> None:
    for body, named in (
        ({"since_ms": 0, "until_ms": 1000, "device_tokens": 2048}, "no request of this range"),
        (RANGE, "device_tokens: no engine of the range's model answers"),
        ({**SMALL, "engines": 65}, "engines: Expected `int` <= 64"),
        ({**SMALL, "trace": "{}"}, "trace: line 1"),
        ({**SMALL, "device_tokens": 0}, "device_tokens: Expected `int` >= 1"),
        ({"nothing": 1}, "nothing: unknown field"),
    ):
        refused = ask(gateway, body, status=400, path=path)
        assert named in refused["error"]["message"], refused


def test_a_key_has_one_plan_at_a_time_which_ends_with_its_client(gateway: str) -> None:
    before = planners()
    with planning(gateway):
        assert planners() - before
        assert httpx.get(f"{gateway}/readyz", timeout=60).status_code in (200, 503)
        assert post(gateway, SMALL).status_code == 429
    eventually(lambda: not planners() - before)
    assert ask(gateway, SMALL)["turns"] == 6


def test_a_planner_that_dies_is_an_error_and_no_empty_answer(gateway: str) -> None:
    before = planners()
    pids: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while not pids and time.monotonic() < until:
            pids.extend(planners() - before)
            time.sleep(0.02)
        os.kill(min(pids), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    reply = post(gateway, LONG)
    killer.join()
    assert reply.status_code == 529 and "ended early" in reply.json()["error"]["message"]


def test_the_command_line_plans_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace(5, 2))
    assert main(["plan", "--trace", str(path), "--device-tokens", "163840"]) == 0
    output = capsys.readouterr().out
    assert "Simulated: 5 requests with 5,120 prompt tokens" in output and "80.0%" in output
    assert "No turn of the range was timed" in output
    for wrong, named in (
        (["--trace", str(path)], "device_tokens"),
        (["--trace", str(path), "--device-tokens", "1"], "device_tokens"),
        (["--trace", str(path), "--engines", "65"], "engines"),
        (["--trace", str(tmp_path / "none")], "none"),
    ):
        assert main(["plan", *wrong]) == 2
        assert named in capsys.readouterr().err
