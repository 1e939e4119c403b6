"""The deadline of a start: kept over what holds the interpreter's lock."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.deadline import StartDeadline
from engine.settings import DEMO_MODEL
from scripts.stack import engine_environment, free_port, python, start

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HOLDS_THE_LOCK = """
import re
from engine.deadline import StartDeadline

with StartDeadline(1) as deadline:
    deadline.note("loading tokenizer")
    re.match("(a*)*(a*)*(a*)*X", "a" * 60)
"""


def line_of(output: bytes) -> dict[str, str]:
    """The one line that says why."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    (failed,) = [line for line in lines if line["event"] == "engine failed"]
    return failed


def test_a_start_that_holds_the_lock_ends_and_says_where() -> None:
    process = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_LOCK], capture_output=True, timeout=300
    )
    assert process.returncode == -signal.SIGKILL
    why = "loading tokenizer: takes more than 1 seconds (ENGINE_LOAD_SECONDS)"
    assert line_of(process.stdout)["error"] == why


def test_a_start_that_goes_on_has_its_time_at_each_step_and_leaves_no_process() -> None:
    with StartDeadline(60) as deadline:
        for number in range(1000):
            deadline.note(f"loading part {number}")
    assert deadline._process.returncode is not None


@pytest.mark.parametrize("backend", ["native"])
def test_an_engine_whose_template_has_no_end_does_not_start(tmp_path: Path, backend: str) -> None:
    """It loaded for ever, and said nothing."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    (model / "chat_template.jinja").write_text(ENDLESS)
    log = tmp_path / "log"
    settings = {"ENGINE_MODEL": str(model), "ENGINE_LOAD_SECONDS": "20"}
    command = [*python("engine"), "--backend", backend]
    process = start(command, engine_environment(free_port(), settings), log)
    try:
        assert process.wait(400) == -signal.SIGKILL
    finally:
        process.kill()
    assert line_of(log.read_bytes())["error"].startswith("loading tokenizer: takes more than 20")
