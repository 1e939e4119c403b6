"""POST /admin/v1/plan and `python -m gateway plan`, of a ledger, a trace and made-up traffic."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli.main import main
from scripts.stack import family
from tests.gateway.admin.test_advise import DAY_MS, RULES, data
from tests.gateway.serving import ADMIN_KEY, eventually, serve_gateway

__all__ = ["data"]
SMALL = {"made": {"tenants": 1, "conversations": 2, "turns": 3}, "device_gib": 24}
LONG = {"made": {"tenants": 50, "conversations": 100, "turns": 10}, "device_gib": 24}
RANGE = {"since_ms": DAY_MS, "until_ms": DAY_MS + 3_600_000}
HEADERS = {"x-api-key": ADMIN_KEY}


@pytest.fixture(scope="module")
def gateway(data: Path) -> Iterator[str]:
    with serve_gateway(data, "http://127.0.0.1:9") as url:
        yield url


def ask(url: str, body: Any, status: int = 200, key: str = ADMIN_KEY, path: str = "plan") -> Any:
    """The answer. A plan that an earlier client left may hold the key's place for a moment."""
    until = time.monotonic() + 60
    while True:
        headers = {"x-api-key": key}
        reply = httpx.post(f"{url}/admin/v1/{path}", json=body, headers=headers, timeout=180)
        if reply.status_code != 429 or time.monotonic() > until:
            break
        time.sleep(0.2)
    assert reply.status_code == status, reply.text
    return reply.json()


def planners() -> set[int]:
    """The processes of plans that run now for gateways of this process, not of other tests."""
    found = set()
    for pid in family(os.getpid()):
        entry = Path("/proc", str(pid))
        try:
            line = (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if b"\x00-m\x00gateway.planner\x00" in line and state != "Z":
            found.add(pid)
    return found


def test_the_turns_of_a_range_are_planned_with_their_measured_prefill(gateway: str) -> None:
    found = ask(gateway, {**RANGE, "device_gib": 24})
    assert found["turns"] == 21 and found["simulated"] is True
    assert found["prompt_tokens"] > 20 * len(RULES) // 4
    assert "100.0 µs (as the quickest quarter of 21 requests" in found["assumptions"][0]
    # Ten and eleven equal system prompts, nothing marked: all but the first are automatic.
    assert found["whole"]["hit_rate"] == 0 and found["whole"]["reuse_rate"] > 0.3
    assert found["whole"]["promise_kept"] is None


@pytest.mark.parametrize(
    "body, named",
    [
        ({"since_ms": 0, "until_ms": 1000}, "no request of this range"),
        ({**SMALL, "model": "gpt-9"}, "model: no family"),
        ({**SMALL, "config": {"num_hidden_layers": 2}}, "config: num_attention_heads"),
        ({**SMALL, "config": []}, "config: Expected `object"),
        ({**SMALL, "engines": 65}, "engines: Expected `int` <= 64"),
        ({**SMALL, "trace": "{}"}, "trace: give either"),
        ({"made": {"tenants": 0}}, "made: Expected `int` >= 1 - at `$.tenants`"),
        ({"made": {"tenant": 1}}, "made: Object contains unknown field `tenant`"),
        ({"nothing": 1}, "nothing: unknown field"),
    ],
)
@pytest.mark.parametrize("path", ["plan", "plan/progress"])
def test_what_is_wrong_is_named(gateway: str, body: Any, named: str, path: str) -> None:
    refused = ask(gateway, body, status=400, path=path)
    assert named in refused["error"]["message"], refused


def test_progress_comes_before_the_plan(gateway: str) -> None:
    whole = ask(gateway, SMALL)
    path = f"{gateway}/admin/v1/plan/progress"
    reply = httpx.post(path, json=SMALL, headers=HEADERS, timeout=180)
    *before, last = map(json.loads, reply.text.splitlines())
    assert before and all(each["kind"] == "progress" for each in before)
    assert last["kind"] == "plan" and last["plan"]["whole"] == whole["whole"]


def test_a_plan_ends_with_its_client_and_stands_in_nobodys_way(gateway: str) -> None:
    """Its processes are gone, and the key's place with them."""
    before = planners()
    with httpx.stream(
        "POST", f"{gateway}/admin/v1/plan/progress", json=LONG, headers=HEADERS, timeout=180
    ) as reply:
        lines = reply.iter_lines()
        assert reply.status_code == 200 and next(lines)
        assert planners() - before
        # Others are answered meanwhile.
        assert httpx.get(f"{gateway}/readyz", timeout=60).status_code in (200, 503)
    until = time.monotonic() + 60
    while planners() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert not planners() - before
    assert ask(gateway, SMALL)["turns"] == 6


def test_a_key_has_one_plan_at_a_time(gateway: str) -> None:
    url = f"{gateway}/admin/v1/plan"
    with httpx.stream(
        "POST", f"{gateway}/admin/v1/plan/progress", json=LONG, headers=HEADERS, timeout=180
    ) as reply:
        lines = reply.iter_lines()
        assert reply.status_code == 200 and next(lines)
        refused = httpx.post(url, json=SMALL, headers=HEADERS, timeout=180)
        assert refused.status_code == 429
    # The client has left, so the next plan has the place soon.
    eventually(lambda: httpx.post(url, json=SMALL, headers=HEADERS, timeout=180).is_success)


def test_a_planner_that_dies_is_an_error_and_no_empty_answer(gateway: str) -> None:
    before = planners()
    found: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 60
        while not found and time.monotonic() < until:
            found.extend(planners() - before)
            time.sleep(0.02)
        os.kill(min(found), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    reply = httpx.post(f"{gateway}/admin/v1/plan", json=LONG, headers=HEADERS, timeout=180)
    killer.join()
    assert reply.status_code == 529 and "ended early" in reply.json()["error"]["message"]


def test_a_workspaces_key_plans_for_its_own_turns_only(gateway: str) -> None:
    for_team = {"id": "team-a"}
    httpx.post(f"{gateway}/admin/v1/workspaces", json=for_team, headers=HEADERS, timeout=60)
    made = httpx.post(
        f"{gateway}/admin/v1/keys",
        json={"workspace": "team-a", "name": "reader", "scope": "read_only"},
        headers=HEADERS,
        timeout=60,
    ).json()
    found = ask(gateway, {**RANGE, "device_gib": 24}, key=made["key"])
    assert found["turns"] == 11
    ask(gateway, {**RANGE, "workspace": "team-b"}, key=made["key"], status=403)


def test_the_command_line_plans_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"timestamp": %d, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}'
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(line % (n * 60_000) for n in range(5)))
    assert main(["plan", "--trace", str(trace), "--device-gib", "24"]) == 0
    said = capsys.readouterr().out
    assert "Simulated: 5 requests with 5,120 prompt tokens" in said and "80.0%" in said
    assert main(["plan", "--trace", str(trace), "--device-gib", "1"]) == 2
    assert "device_gib" in capsys.readouterr().err
    assert main(["plan", "--made", "tenants=x"]) == 2
    assert "tenants" in capsys.readouterr().err
    assert main(["plan", "--config", str(trace), "--made", "tenants=1"]) == 2
    assert "--config" in capsys.readouterr().err


def test_the_planner_alone_reads_a_job_and_says_what_is_wrong() -> None:
    """The process that the gateway starts; a job that is no job ends it with an error."""
    done = subprocess.run(
        [sys.executable, "-m", "gateway.planner"], input=b"\xc1", capture_output=True, check=False
    )
    assert done.returncode != 0 and not done.stdout
