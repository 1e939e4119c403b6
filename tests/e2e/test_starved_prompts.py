"""Short prompts without an entry, behind chats that never come back: over HTTP, one workspace.

All sizes are an eighth of the default's: 256 blocks of 16 tokens, a minimum of 128 tokens, and 14
chats of more than 512, which are 1.8 times the memory. On vLLM what has no lease follows vLLM's own
order of reuse.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.stack import (
    API_KEY,
    Server,
    engine_environment,
    free_port,
    serving,
    serving_engine,
    serving_gateway,
)
from tests.conformance.engines import VLLM_ON_CPU
from tests.fuzz.tiny_model import write_tiny_model

NUM_CHATS = 14
NUM_SHORT = 40
NUM_SYSTEMS = 5
BLOCKS = 256
BLOCK_TOKENS = 16
MIN_TOKENS = 128
Post = Callable[[dict[str, Any]], dict[str, Any]]

NEEDS_VLLM = pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="needs vLLM: VLLM_PYTHON")
ENGINES = ["native", pytest.param("vllm", marks=NEEDS_VLLM)]
VLLM_SIZE = 32
"""vLLM's attention on a CPU takes heads of 32 and more, and blocks of 32 tokens."""


def start_engine(backend: str, settings: Mapping[str, str]) -> AbstractContextManager[Server]:
    if backend == "native":
        return serving_engine("native", settings)
    port = free_port()
    command = [os.environ["VLLM_PYTHON"], "-m", "engine", "--backend", "vllm"]
    environment = engine_environment(
        port,
        {
            **settings,
            "ENGINE_BLOCK_SIZE": str(VLLM_SIZE),
            "ENGINE_NUM_BLOCKS": str(BLOCKS * BLOCK_TOKENS // VLLM_SIZE),
            "ENGINE_DTYPE": "float32",
            "ENGINE_VLLM_ARGS": '{"max_model_len": 4096}',
        },
    )
    return serving(command, environment, port, base=VLLM_ON_CPU | dict(os.environ))


@pytest.fixture(params=ENGINES)
def post(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Post]:
    """Sends a request of Chat Completions, and returns the answer."""
    head_dim = VLLM_SIZE if request.param == "vllm" else 16
    settings = {
        "ENGINE_MODEL": str(write_tiny_model(tmp_path / "tiny", head_dim)),
        "ENGINE_NUM_BLOCKS": str(BLOCKS),
        "ENGINE_BLOCK_SIZE": str(BLOCK_TOKENS),
        "ENGINE_MIN_CACHE_TOKENS": str(MIN_TOKENS),
    }
    with (
        start_engine(request.param, settings) as engine,
        serving_gateway(tmp_path / "gateway", [engine.url]) as gateway,
        httpx.Client(base_url=gateway.url, timeout=120) as client,
    ):
        engine.wait()
        gateway.wait()
        client.headers["authorization"] = f"Bearer {API_KEY}"

        def send(body: dict[str, Any]) -> dict[str, Any]:
            fields = {"model": "tiny", "max_tokens": 1, "temperature": 0}
            response = client.post("/v1/chat/completions", json={**fields, **body})
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        yield send


def words(name: str, count: int) -> str:
    """A text that begins like no other name's."""
    return " ".join(f"{name}{number}" for number in range(count))


def short(post: Post) -> tuple[float, set[tuple[str, str | None]]]:
    """Ask all short prompts. Return the share of their tokens that was reused, and what became of
    their breakpoints."""
    reused = total = 0
    ends: set[tuple[str, str | None]] = set()
    for number in range(NUM_SHORT):
        system = words(f"S{number % NUM_SYSTEMS}", 18)
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": f"Question {number}?"},
        ]
        answer = post({"messages": messages})
        holdfast = answer["holdfast"]
        tokens = answer["usage"]["prompt_tokens"]
        assert 4 * BLOCK_TOKENS < tokens < MIN_TOKENS, tokens
        total += tokens
        reused += tokens - holdfast["computed_tokens"]
        ends |= {(point["state"], point["reason"]) for point in holdfast["breakpoints"]}
    return reused / total, ends


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_marked", [False, True], ids=["unmarked", "marked"])
def test_chats_that_never_come_back_starve_no_short_prompts(post: Post, is_marked: bool) -> None:
    mark = {"cache_control": {"type": "ephemeral"}} if is_marked else {}
    first, ends = short(post)
    again, _ = short(post)
    assert ends == {("none", "below_minimum")}
    states = []
    for number in range(NUM_CHATS):
        text = {"type": "text", "text": words(f"C{number}x", 85), **mark}
        answer = post({"messages": [{"role": "user", "content": [text]}]})
        assert 500 < answer["usage"]["prompt_tokens"] < 700
        states += [(point["state"], point["reason"]) for point in answer["holdfast"]["breakpoints"]]
    if is_marked:
        # The first ones have the budget; what comes later is best-effort.
        assert states[0] == ("leased", None) and states[-1] == ("best_effort", "over_budget")
    else:
        assert set(states) == {("best_effort", "automatic")}
    behind, _ = short(post)
    repeated, _ = short(post)
    print(f"reused {first:.3f}, {again:.3f}; behind the chats {behind:.3f}, {repeated:.3f}")
    assert behind == pytest.approx(first, abs=0.02) and first > 0.5
    assert repeated == pytest.approx(again, abs=0.02) and again > first
