"""A `vllm serve` of somebody's own with the packed plugin in it, behind a gateway.

What its operator may do there: pause it while turns run, and put a connector beside ours.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from gateway.base.errors import AnswerAborted
from scripts.bench.load import marked
from scripts.stack import API_KEY, ENGINE_SECRET, ROOT, Server, free_port, serving, serving_gateway
from tests.conformance.engines import CONNECTOR, MOUNT, VLLM_ON_CPU, vllm_serve
from tests.e2e.prompts import handbook
from tests.gateway.admin_client import Admin
from tests.gateway.process import new_key
from tests.gateway.serving import eventually

pytestmark = [
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter"),
    pytest.mark.timeout(1200),
]
MODEL = "on-vllm"
MODELS_TOML = f"""default = "{MODEL}"

[[models]]
id = "{MODEL}"
engine_model = "holdfast-demo"
min_cache_tokens = 64
"""
SETTINGS = {"NUM_BLOCKS": 256, "BLOCK_SIZE": 32, "VLLM_ARGS": '{"max_model_len": 4096}'}
FLAG = "ENGINE_VLLM_SHARES_KV_ACROSS_SCOPES"
RUNNING = 3
LONG = 400
"""Tokens that take longer to draw than a pause takes to come."""
SECONDS = 480.0


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin as it is packed from this tree, for PYTHONPATH."""
    tree = tmp_path_factory.mktemp("tree")
    shutil.copy(ROOT / "pyproject.toml", tree)
    skipped = shutil.ignore_patterns("__pycache__", "holdfast-demo", "build", "*.egg-info")
    shutil.copytree(ROOT / "engine", tree / "engine", ignore=skipped)
    folder = tmp_path_factory.mktemp("plugin")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(folder), "./engine/mount/distribution"]
    subprocess.run(command, cwd=tree, check=True)
    return folder


@contextmanager
def mounted(
    plugin: Path, log: Path, transfer: Mapping[str, Any] = CONNECTOR, **variables: str
) -> Iterator[Server]:
    """Started, and not waited for."""
    port = free_port()
    command, environment = vllm_serve(port, SETTINGS, is_mounted=True, transfer=transfer)
    path = os.pathsep.join(filter(None, (str(plugin), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": path, **variables}
    base = VLLM_ON_CPU | dict(os.environ)
    ready = f"{MOUNT}/readyz"
    with serving(command, environment, port, ready=ready, log=log, base=base) as server:
        yield server


@dataclass(frozen=True)
class Stack:
    """A vLLM and a gateway before it; `other` is a key of a second workspace."""

    vllm: str
    gateway: str
    other: str

    def call(self, path: str) -> None:
        httpx.post(f"{self.vllm}{path}", timeout=SECONDS).raise_for_status()

    def stats(self) -> Any:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        reply = httpx.get(f"{self.vllm}{MOUNT}/v1/stats", headers=headers, timeout=SECONDS)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def post(self, text: str, key: str = API_KEY, max_tokens: int = 8) -> httpx.Response:
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
        return httpx.post(
            f"{self.gateway}/v1/messages",
            json=body_of(text, max_tokens),
            headers=headers,
            timeout=SECONDS,
        )

    def read_tokens(self, text: str) -> int:
        reply = self.post(text)
        assert reply.status_code == 200, reply.text
        tokens: int = reply.json()["usage"]["cache_read_input_tokens"]
        return tokens


def body_of(text: str, max_tokens: int) -> dict[str, Any]:
    question = [{"role": "user", "content": "What is a lease?"}]
    return {"model": MODEL, "max_tokens": max_tokens, "system": marked(text), "messages": question}


@contextmanager
def stack_of(folder: Path, server: Server) -> Iterator[Stack]:
    server.wait()
    models = folder / "models.toml"
    models.write_text(MODELS_TOML)
    settings = {"HOLDFAST_MODELS": str(models), "HOLDFAST_LOG_LEVEL": "error"}
    with serving_gateway(folder / "data", [f"{server.url}{MOUNT}"], settings) as gateway:
        gateway.wait()
        yield Stack(server.url, gateway.url, new_key(folder / "data", "other")[1])


def run_long(stack: Stack, text: str, began: list[str]) -> str:
    """A streamed turn that no end token ends: how it ended, by the code of its error."""
    client = OpenAI(api_key=API_KEY, base_url=f"{stack.gateway}/v1", max_retries=0, timeout=SECONDS)
    with client:
        try:
            chunks = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": text}],
                max_tokens=LONG,
                stream=True,
                extra_body={"min_tokens": LONG},
            )
            # The first chunk comes with the first token, which need not be of a text.
            for _ in chunks:
                began.append(text)
        except APIError as error:
            return str(error.code)
        return "end"


def turns_of(stack: Stack, outcome: str) -> list[dict[str, Any]]:
    """The newest first, once as many are closed as ran."""
    rows = list[dict[str, Any]]()

    def are_there() -> bool:
        turns = Admin(stack.gateway).get("turns")
        rows[:] = [row for row in turns if row["outcome"] == outcome and row["output_tokens"]]
        return len(rows) >= RUNNING

    eventually(are_there, seconds=SECONDS)
    return rows


@pytest.fixture(scope="module")
def stack(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Its operator's routes, `/pause` among them, are there."""
    folder = tmp_path_factory.mktemp("stack")
    with ExitStack() as ends:
        log = folder / "vllm.log"
        server = ends.enter_context(mounted(plugin, log, VLLM_SERVER_DEV_MODE="1"))
        yield ends.enter_context(stack_of(folder, server))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_ends_at_most_the_turns_that_it_meets_by_their_own_name(
    stack: Stack, mode: str
) -> None:
    """vLLM gives up what runs (abort) or not, and refuses what comes (0.33) or has it wait."""
    text = handbook(20)
    written_tokens = stack.post(text).json()["usage"]["cache_creation_input_tokens"]
    assert written_tokens and stack.read_tokens(text) == written_tokens
    began = list[str]()
    with ThreadPoolExecutor(RUNNING + 1) as pool:
        runs = [
            pool.submit(run_long, stack, handbook(4 + number), began) for number in range(RUNNING)
        ]
        eventually(
            lambda: len(set(began)) == RUNNING or any(run.done() for run in runs), seconds=SECONDS
        )
        assert [run.result() for run in runs if run.done()] == []
        stack.call(f"/pause?mode={mode}&clear_cache=false")
        during = pool.submit(stack.post, text)
        try:
            paused = stack.stats()
            assert paused["leases"]["blocks"] >= written_tokens // 32
            # Longer than a refusal takes.
            time.sleep(5)
        finally:
            stack.call("/resume")
        ends = [run.result() for run in runs]
        met = during.result()
    if mode == "abort":
        assert ends == ["overloaded"] * RUNNING
        given_up = turns_of(stack, "overloaded_error")[:RUNNING]
        assert {row["error"] for row in given_up} == {str(AnswerAborted())}
        assert all(0 < row["output_tokens"] < LONG for row in given_up)
    else:
        assert ends == ["end"] * RUNNING
    assert met.status_code in (200, 529), met.text
    if met.status_code == 529:
        assert met.json()["error"]["type"] == "overloaded_error"
        assert mode != "keep"
    eventually(lambda: stack.post(text).status_code == 200, seconds=SECONDS)
    assert stack.read_tokens(text) == written_tokens
    after = stack.stats()
    assert after["running"] == after["waiting"] == 0
    (engine,) = Admin(stack.gateway).get("engines")
    assert engine["status"] == "ready"
    assert (engine["breaker"], engine["times_opened"]) == ("closed", 0)


MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}


def beside(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder)}
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    children = [CONNECTOR, example | {"kv_connector_extra_config": extra}]
    return MULTI | {"kv_connector_extra_config": {"connectors": children}}


def test_a_connector_that_shares_content_ends_the_start_by_its_name(
    plugin: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with mounted(plugin, log, beside(tmp_path / "kv")) as server:
        assert server.process.wait(SECONDS) != 0
    log_lines = [line for line in log.read_text("utf-8").splitlines() if "holdfast: " in line]
    assert (
        len(log_lines) == 1 and "ExampleConnector" in log_lines[0] and f"{FLAG}=1" in log_lines[0]
    )
    assert "Traceback" not in log.read_text("utf-8")
    assert not (tmp_path / "kv").exists()


def test_where_the_risk_is_accepted_gateway_and_answers_say_so(
    plugin: Path, tmp_path: Path
) -> None:
    """What one workspace sent is then read by another, which is why."""
    transfer = beside(tmp_path / "kv")
    with ExitStack() as ends:
        server = ends.enter_context(mounted(plugin, tmp_path / "log", transfer, **{FLAG: "1"}))
        stack = ends.enter_context(stack_of(tmp_path, server))
        (engine,) = Admin(stack.gateway).get("engines")
        promises = {promise["name"]: promise for promise in engine["description"]["guarantees"]}
        assert promises["isolation"]["is_kept"] is False
        assert "ExampleConnector" in json.dumps(promises["isolation"])
        text = handbook(20)
        first = stack.post(text).json()
        foreign = stack.post(text, key=stack.other).json()
        assert first["holdfast"]["is_isolated"] is foreign["holdfast"]["is_isolated"] is False
        assert foreign["usage"]["cache_read_input_tokens"] == 0
