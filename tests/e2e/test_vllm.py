"""The main job on the engine that people run: official SDK, real gateway, an engine on vLLM."""

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types import Message

from scripts.bench.load import marked
from scripts.stack import API_KEY, ROOT, engine_environment, free_port
from tests.conformance.engines import VLLM_ON_CPU, Engine, running_engine
from tests.e2e.prompts import handbook
from tests.fuzz.houses import serving
from tests.fuzz.servers import Machines

pytestmark = [
    pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="VLLM_PYTHON names no interpreter"),
    pytest.mark.timeout(900),
]
MODEL = "on-vllm"
MODELS_TOML = f"""default = "{MODEL}"

[[models]]
id = "{MODEL}"
engine_model = "holdfast-demo"
min_cache_tokens = 64
"""
NUM_BLOCKS = 256
BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = {
        "NUM_BLOCKS": NUM_BLOCKS,
        "BLOCK_SIZE": BLOCK_SIZE,
        "VLLM_ARGS": '{"max_model_len": 4096}',
    }
    with running_engine("vllm", settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anthropic]:
    with serving(tmp_path_factory.mktemp("gateway"), Machines([engine]), MODELS_TOML, []) as stack:
        with Anthropic(api_key=API_KEY, base_url=stack[0], max_retries=0, timeout=120) as client:
            yield client


def ask(client: Anthropic, text: str, *, is_marked: bool = True, stream: bool = False) -> Message:
    question: list[Any] = [{"role": "user", "content": "What is a lease?"}]
    system: Any = marked(text) if is_marked else text
    body: Any = {"model": MODEL, "max_tokens": 16, "system": system, "messages": question}
    if not stream:
        message: Message = client.messages.create(**body)
        return message
    with client.messages.stream(**body) as events:
        return events.get_final_message()


def said(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_what_was_marked_alone_survives_a_flood(client: Anthropic, engine: Engine) -> None:
    text = handbook(80)
    unmarked = handbook(80)
    before = engine.stats()
    first = ask(client, text)
    tokens = first.usage.cache_creation_input_tokens or 0
    assert tokens > 0 and tokens % BLOCK_SIZE == 0
    assert first.usage.cache_read_input_tokens == 0

    def check(*, stream: bool) -> None:
        second = ask(client, text, stream=stream)
        assert second.usage.cache_read_input_tokens == tokens
        assert second.usage.cache_creation_input_tokens == 0
        assert said(second) == said(first)

    def reused() -> int:
        """Tokens of the unmarked prompt that are in memory."""
        earlier = engine.stats().counters.automatic_tokens
        ask(client, unmarked, is_marked=False)
        return engine.stats().counters.automatic_tokens - earlier

    for stream in (False, True):
        check(stream=stream)
    reused()
    warm = reused()
    assert warm > 1000
    flooded = sum(ask(client, handbook(80), is_marked=False).usage.input_tokens for _ in range(40))
    assert flooded > 3 * NUM_BLOCKS * BLOCK_SIZE, "not enough to turn the pool over"
    assert reused() < warm // 10
    check(stream=False)
    counters = engine.stats().counters
    assert counters.leases_sacrificed == before.counters.leases_sacrificed == 0


@pytest.mark.parametrize(
    ("vllm_args", "advice"),
    [
        ('{"max_model_len": 1024}', "vLLM did not start; its own lines above say why"),
        ('{"model": "x"}', "ENGINE_VLLM_ARGS: `model` is set by the engine"),
    ],
)
def test_a_start_that_can_not_be_says_in_one_line_what_to_set(vllm_args: str, advice: str) -> None:
    settings = {
        "ENGINE_NUM_BLOCKS": "8",
        "ENGINE_BLOCK_SIZE": str(BLOCK_SIZE),
        "ENGINE_VLLM_ARGS": vllm_args,
    }
    ended = subprocess.run(
        [os.environ["VLLM_PYTHON"], "-m", "engine", "--backend", "vllm"],
        env={**VLLM_ON_CPU, **os.environ, **engine_environment(free_port(), settings)},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if "engine failed" in line]
    assert advice in line and "trace" not in line
