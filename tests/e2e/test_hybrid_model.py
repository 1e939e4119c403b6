"""A model with linear layers behind the protocol: written, read, brought back, and restarted."""

import os
from pathlib import Path

import pytest

from engine.backends.native import load_native
from engine.compute.errors import ModelRefused
from engine.protocol.reports import EntryInfo
from engine.settings import Settings
from tests.conformance.engines import SECRET, Answer, Engine, prompt, running_engine
from tests.engine.backends.vllm.models import write_qwen3_next
from tests.fuzz.tiny_model import write_tiny_model

SCOPE = "hybrid"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str | int | float]:
    return {
        "MIN_CACHE_TOKENS": 32,
        "BLOCK_SIZE": 16,
        "MODEL": str(write_tiny_model(tmp_path / "tiny", is_hybrid=True)),
        "NUM_BLOCKS": 64,
        "HOST_BLOCKS": 128,
        "LEASE_SHARE": 0.3,
        "STORE": str(tmp_path / "store"),
    }


def ask(engine: Engine, text: str, tail: str, **wishes: int) -> Answer:
    wishes = {"max_tokens": 8} | wishes
    return engine.ask(prompt(text, tail), SCOPE, (0, "1h"), **wishes)


def test_a_state_is_exact_in_every_tier(settings: dict[str, str | int | float]) -> None:
    with running_engine("native", settings) as engine:
        assert engine.description.state_blocks > 0
        text = engine.text(200)
        tail = engine.text(20)
        cold = ask(engine, text, tail)
        end = engine.ends(prompt(text, tail))[0]
        assert (cold.usage.cache_read_tokens, cold.usage.cache_write_1h_tokens) == (0, end)
        warm = ask(engine, text, tail)
        assert warm.usage.cache_read_tokens == end and warm.text() == cold.text()
        three = ask(engine, text, tail, num_choices=3)
        assert three.usage.cache_read_tokens == end
        assert [three.text(choice) for choice in range(3)] == [cold.text()] * 3
        for _ in range(6):  # best-effort entries go to the host and to the store
            ask(engine, engine.text(300), tail)
        flooded = ask(engine, text, tail)
        assert flooded.usage.cache_read_tokens == end and flooded.text() == cold.text()
        (entry,) = [
            entry for entry in engine.get("entries", list[EntryInfo]) if entry.tokens == end
        ]
        assert entry.blocks == -(-end // engine.description.block_size) + (
            engine.description.state_blocks
        )
    with running_engine("native", settings) as engine:
        restarted = ask(engine, text, tail)
        assert restarted.usage.cache_read_tokens == end, restarted.started.miss_reason
        assert restarted.started.read_tier == "disk" and restarted.text() == cold.text()


def test_speculation_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", is_hybrid=True)
    speculative = Settings(
        backend="native", secret=SECRET, model=str(model), num_blocks=64, speculation="ngram"
    )
    with pytest.raises(ModelRefused, match="takes no proposed token back"):
        load_native(speculative, lambda _stage, _share: None)


@pytest.mark.timeout(600)
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="needs vLLM: VLLM_PYTHON")
@pytest.mark.parametrize("is_mounted", [False, True], ids=["own", "plugin"])
def test_a_state_is_kept_at_a_mark_inside_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mounted: bool
) -> None:
    """vLLM's own states lie at blocks' ends behind the mark, in a tail that comes once."""
    if is_mounted:
        monkeypatch.setenv("VLLM_MOUNTED", "1")
    settings: dict[str, str | int | float] = {
        "MIN_CACHE_TOKENS": 32,
        "MODEL": str(write_qwen3_next(tmp_path / "model")),
        "DTYPE": "bfloat16",
        "BLOCK_SIZE": 32,
        "NUM_BLOCKS": 40,
        "VLLM_ARGS": '{"max_model_len": 8192}',
    }
    with running_engine("vllm", settings) as engine:
        size = engine.description.granularity
        assert size == engine.description.block_size > 512
        text = engine.text(2 * size + 50)
        tails = [engine.text(size + 50) for _ in range(3)]
        cold = ask(engine, text, tails[0])
        assert cold.usage.cache_write_1h_tokens == 2 * size
        assert [report.state for report in cold.started.breakpoints] == ["leased"]
        for _ in range(12):  # others' prompts fill the pool
            engine.ask(prompt(engine.text(3 * size)), "others", max_tokens=1)
        warm = ask(engine, text, tails[1])
        assert warm.usage.cache_read_tokens == 2 * size
        assert ask(engine, text, tails[0]).text() == cold.text()
