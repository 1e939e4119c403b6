"""scripts/demo: the story's end, and each way in which it can't be told, in one line."""

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scripts.runs import Run, ended, free_base, only_line, started

LIGHT = ("--engine", "synthetic", "--no-dashboard", "--engine-arg", "num_blocks=2048")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with started(folder, *LIGHT) as running:
        running.wait_said("Holdfast is running")
        yield running


def test_the_story_ends_in_one_sentence_with_what_was_measured(run: Run) -> None:
    process = ended("demo", "--data", run.data, "--model", "synthetic")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("synthetic, with a memory of 32,768 tokens")
    lines = process.stdout.splitlines()
    assert re.fullmatch(
        r"\d+ times sooner: [\d.]+ s → [\d.]+ s; after a flood of [\d,]+ tokens still [\d.]+ s, "
        r"and [\d.]+ s without a lease\.",
        lines[-1],
    ), lines[-1]
    written_counts = re.findall(r"([\d,]+) tokens written", process.stdout)
    assert re.findall(r"([\d,]+) tokens read", process.stdout) == [*written_counts, *written_counts]
    (flood,) = re.findall(r"([\d,]+) tokens in \d+ s", process.stdout)
    assert int(flood.replace(",", "")) > 2048 * 16
    assert "\r" not in process.stdout, "a file gets no live line"


def test_a_wrong_key_is_told_and_the_stored_one_is_tried(run: Run, tmp_path: Path) -> None:
    wrong_keys = {"HOLDFAST_API_KEY": "hf-wrong", "HOLDFAST_ADMIN_KEY": "hf-admin-wrong"}
    message = only_line(ended("demo", "--url", run.url, "--data", tmp_path, **wrong_keys), "demo")
    assert f"{run.url} refuses the key of the environment; set HOLDFAST_ADMIN_KEY" in message
    assert ended("demo", "--data", run.data, **wrong_keys).returncode == 0
    message = only_line(ended("demo", "--data", run.data, "--model", "other"), "demo")
    assert message.endswith("serves no other; --model is one of: synthetic")


def test_what_does_not_run_or_is_no_gateway_is_told(tmp_path: Path) -> None:
    def said(*arguments: str, **keys: str) -> str:
        return only_line(ended("demo", *arguments, "--data", tmp_path, **keys), "demo")

    assert "start scripts/run in another terminal" in said()
    keys = {"HOLDFAST_API_KEY": "hf-a", "HOLDFAST_ADMIN_KEY": "hf-b"}
    port = str(free_base())
    output = said("--port", port, **keys)
    assert f"nothing answers at http://127.0.0.1:{port}; start scripts/run" in output
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        output = said("--url", f"http://127.0.0.1:{server.server_port}", **keys)
        server.shutdown()
    assert "is no gateway that can tell the story" in output and "answered 501" in output
