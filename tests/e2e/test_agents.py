"""Other people's agents, unmodified: Codex and two JavaScript SDKs on Responses, Gemini CLI.

`scripts/long_tests agents` installs them from npm. The engine is scripted: it renders the demo
model's template and makes the calls that its script says (`tests/scripted_engine.py`).
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.stack import ADMIN_KEY, API_KEY, ROOT, serving_engine, serving_gateway
from tests.gateway.serving import eventually
from tests.scripted_engine import settings_of

FOLDER = os.environ.get("AGENTS_FOLDER")
NUM_TURNS = 5
LEAST_READ = 0.95
SECONDS = 300

pytestmark = pytest.mark.skipif(not FOLDER, reason="scripts/long_tests agents installs the agents")


@contextmanager
def native(data: Path) -> Iterator[str]:
    """The demo model, which answers and calls nothing of Codex's."""
    with serving_engine("native", {}) as engine:
        engine.wait()
        with serving_gateway(data, [engine.url]) as gateway:
            gateway.wait()
            yield gateway.url


@contextmanager
def serving(data: Path, script: Mapping[str, str]) -> Iterator[str]:
    settings = {
        **settings_of(str(ROOT / "engine" / "holdfast-demo"), script),
        "ENGINE_SYNTHETIC_PREFILL_US": "1",
        "ENGINE_SYNTHETIC_DECODE_MS": "0",
    }
    with serving_engine("synthetic", settings, module="tests.scripted_engine") as engine:
        engine.wait()
        with serving_gateway(data, [engine.url]) as gateway:
            gateway.wait()
            yield gateway.url


def call(name: str, given: dict[str, Any]) -> str:
    """A call as the demo model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def turns(url: str) -> list[dict[str, Any]]:
    headers = {"x-api-key": ADMIN_KEY}
    found = httpx.get(f"{url}/admin/v1/turns", headers=headers, timeout=120).json()
    return sorted(found, key=lambda turn: turn["opened_ms"])


def run(command: list[str], folder: Path, **environment: str) -> str:
    """What a program prints. No proxy stands between it and the gateway."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "NO_PROXY": "*", "no_proxy": "*", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_codex_reads_all_but_its_last_turn_without_a_marker(tmp_path: Path) -> None:
    steps = {
        f"turn {number}": call("exec_command", {"cmd": f"echo step {number}"})
        for number in range(1, NUM_TURNS)
    }
    with serving(tmp_path / "data", {**steps, f"turn {NUM_TURNS}": "All is done."}) as url:
        codex = Codex(tmp_path, url, "scripted")
        printed = codex.exec("Do the steps.")
        eventually(lambda: len(turns(url)) == NUM_TURNS, 120)
        rows = turns(url)
    events = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    assert [item["aggregated_output"] for item in commands] == [
        f"step {number}\n" for number in range(1, NUM_TURNS)
    ]
    assert items[-1]["text"] == "All is done."
    usage = events[-1]["usage"]
    read, prompt = shares(rows[1:])
    print(f"{read:,} of {prompt:,} tokens of turns 2 to {NUM_TURNS} were read: {read / prompt:.2%}")
    assert read >= LEAST_READ * prompt
    reused = [row["cache_read_tokens"] + row["automatic_tokens"] for row in rows]
    written = [max(0, row["cache_write_5m_tokens"] - row["automatic_tokens"]) for row in rows]
    assert usage["input_tokens"] == shares(rows)[1]
    assert usage["cached_input_tokens"] == sum(reused)
    assert usage["cache_write_input_tokens"] == sum(written)


def test_a_codex_session_on_the_native_engine_reads_all_but_its_last_turn(tmp_path: Path) -> None:
    with native(tmp_path / "data") as url:
        codex = Codex(tmp_path, url, "holdfast-demo")
        for number in range(NUM_TURNS):
            codex.exec(f"What is a lease? {number}", is_resumed=number > 0)
        eventually(lambda: len(turns(url)) == NUM_TURNS, 120)
        rows = turns(url)
    read, prompt = shares(rows[1:])
    print(f"{read:,} of {prompt:,} tokens of turns 2 to {NUM_TURNS} were read: {read / prompt:.2%}")
    assert read >= LEAST_READ * prompt


class Codex:
    """Codex with a home of its own, pointed at a gateway by its configuration alone."""

    def __init__(self, folder: Path, url: str, model: str) -> None:
        self._home, self._work = folder / "home", folder / "work"
        self._home.mkdir(), self._work.mkdir()
        (self._home / "config.toml").write_text(
            f'model = "{model}"\nmodel_provider = "holdfast"\n'
            '[model_providers.holdfast]\nname = "Holdfast"\nenv_key = "HOLDFAST_KEY"\n'
            f'wire_api = "responses"\nbase_url = "{url}/v1"\n'
        )

    def exec(self, prompt: str, *, is_resumed: bool = False) -> str:
        """The events of one `codex exec`, a JSON object each line."""
        program = [f"{FOLDER}/node_modules/.bin/codex", "exec"]
        resume = ["resume", "--last"] if is_resumed else []
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        command = [*program, *resume, *options, prompt]
        return run(command, self._work, CODEX_HOME=str(self._home), HOLDFAST_KEY=API_KEY)


def shares(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """The tokens that were read, and all tokens of the prompts."""
    read = sum(row["cache_read_tokens"] for row in rows)
    new = sum(row["input_tokens"] + row["cache_write_5m_tokens"] for row in rows)
    return read, read + new


def test_both_javascript_sdks_take_every_answer(tmp_path: Path) -> None:
    looks = call("look", {"where": "here"})
    pair = [looks, "It is a cat."]
    script = {f"turn {number + 1}": text for number, text in enumerate(pair * 3)}
    folder = Path(str(FOLDER)) / "sdk"
    shutil.copy(Path(__file__).parent / "responses_clients.mjs", folder)
    with serving(tmp_path / "data", script) as url:
        printed = run(
            [f"{FOLDER}/node_modules/.bin/node", "responses_clients.mjs", url, API_KEY], folder
        )
    said = json.loads(printed.splitlines()[-1])
    assert said == {
        "call": {"where": "here"},
        "events": ["response.created", "response.completed"],
        "text": "It is a cat.",
        "generated": {"text": "It is a cat.", "steps": 2},
        "streamed": {"text": "It is a cat.", "steps": 2},
    }


def test_gemini_cli_reads_all_but_its_last_turn_without_a_marker(tmp_path: Path) -> None:
    """Google's agent over `streamGenerateContent`, with four calls of its shell tool."""
    steps = {
        f"turn {number}": call(
            "run_shell_command", {"command": f"echo step {number}", "description": "a step"}
        )
        for number in range(1, NUM_TURNS)
    }
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".gemini").mkdir(parents=True)
    work.mkdir()
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    with serving(tmp_path / "data", {**steps, f"turn {NUM_TURNS}": "All is done."}) as url:
        gemini = [f"{FOLDER}/node_modules/.bin/gemini", "-m", "scripted", "--yolo", "--skip-trust"]
        printed = run(
            [*gemini, "-o", "json", "-p", "Do the steps."],
            work,
            HOME=str(home),
            GEMINI_API_KEY=API_KEY,
            GOOGLE_GEMINI_BASE_URL=url,
        )
        eventually(lambda: len(turns(url)) == NUM_TURNS, 120)
        rows = turns(url)
    told = json.loads(printed[printed.index("{") :])
    assert told["response"].strip() == "All is done."
    assert told["stats"]["tools"]["totalSuccess"] == NUM_TURNS - 1
    [counted] = [model["tokens"] for model in told["stats"]["models"].values()]
    assert counted["cached"] == sum(row["cache_read_tokens"] for row in rows)
    assert counted["candidates"] == sum(row["output_tokens"] for row in rows)
    read, prompt = shares(rows[1:])
    print(f"{read:,} of {prompt:,} tokens of turns 2 to {NUM_TURNS} were read: {read / prompt:.2%}")
    assert read >= LEAST_READ * prompt
