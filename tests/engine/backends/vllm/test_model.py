"""With a model behind: what a lease kept is the KV that was computed, to the token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.vllm import directive
from tests.engine.backends.vllm.simulator import TOKEN, tokens_of, transfer_config

pytestmark = pytest.mark.timeout(600)


class Engine:
    """vLLM in this process. `block` is what a hit is a multiple of."""

    def __init__(self, model: Path, *, dtype: str = "float32", num_blocks: int = 384) -> None:
        self._llm = vllm.LLM(
            model=str(model),
            dtype=dtype,
            enforce_eager=True,
            block_size=32,  # the least that vLLM's CPU attention takes
            max_model_len=8192,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=num_blocks,
            kv_transfer_config=transfer_config(),
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        self.block = self._core.scheduler.block_size
        self.call("bind", TOKEN)

    def run(
        self, name: str, prompt: list[int], *wants: tuple[str, int], read: str | None = None
    ) -> Any:
        what = directive.Directive(
            request_id=name,
            token=TOKEN,
            scope="scope",
            wants=[directive.Want(key=key, tokens=n, expires_at=1.0) for key, n in wants],
            read=read,
        )
        params = vllm.SamplingParams(
            max_tokens=16,
            temperature=0,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {directive.PARAM_KEY: msgspec.to_builtins(what)}},
        )
        return self._llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]

    def call(self, name: str, *args: Any) -> Any:
        return getattr(self._core, directive.CALL.format(name))(*args)

    def reset(self) -> bool:
        return bool(self._llm.reset_prefix_cache())


@pytest.fixture(scope="module", params=["llama", "gemma", "qwen3_next"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    model = request.getfixturevalue(request.param)
    if request.param == "qwen3_next":  # a state is as large as 1,088 tokens or more
        yield Engine(model, dtype="bfloat16", num_blocks=24)
    else:
        yield Engine(model)


def test_what_was_kept_continues_with_the_same_tokens(engine: Engine) -> None:
    """The hybrid's marks are no ends of its own chunks of 512."""
    half = 10 * engine.block if engine.block < 512 else engine.block
    prefix = tokens_of("prefix", 2 * half)
    cold = engine.run("cold", [*prefix, 5, 6], ("inner", half), ("outer", 2 * half))
    assert cold.num_cached_tokens == 0
    for index in range(42):  # some times the pool
        engine.run(f"flood{index}", tokens_of(f"flood{index}", max(1000, half + 9)))
    warm = engine.run("warm", [*prefix, 5, 6], read="outer")
    assert warm.num_cached_tokens == 2 * half
    assert engine.call("report", "warm")["hit_tokens"] == 2 * half
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    inner = engine.run("inner", [*prefix[:half], 5], read="inner")
    assert inner.num_cached_tokens == half
    assert engine.call("losses") == []
    assert engine.reset()
    plain = engine.run("plain", [*prefix[:half], 5])
    assert plain.num_cached_tokens == 0
    assert plain.outputs[0].token_ids == inner.outputs[0].token_ids
    assert engine.call("core_stats")["leased_blocks"] == 0
