"""Models and arguments that the attention can't do exactly are refused, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    T5Config,
)

from engine.cache.ids import BlockId
from engine.compute.attention.step import STEP_ARGUMENT, AttentionStep, paged_attention
from engine.compute.batch import build_batch
from engine.compute.errors import ModelRefused
from engine.compute.kv import KvLayout, KvPool
from engine.compute.loading import check_config, load_model, prepare_model
from engine.schedule.runner import Work
from tests.engine.compute.tiny import TinyModel

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV3Config(), "latent attention"),
        (MambaConfig(), "state-space"),
        (FalconConfig(alibi=True), "ALiBi"),
        (T5Config(), "encoder|bias"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
         "length: dynamic"),
    ],
)  # fmt: skip
def test_a_configuration_with_other_mechanisms_is_refused(
    config: PretrainedConfig, reason: str
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        check_config(config)


def test_attention_sinks_are_refused() -> None:
    config = GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, pad_token_id=0)
    with pytest.raises(ModelRefused, match="s_aux"):
        prepare_model(AutoModelForCausalLM.from_config(config))


def test_a_class_without_attention_backends_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=99, hidden_size=32, n_layer=1))
    with pytest.raises(ModelRefused, match="BloomForCausalLM"):
        prepare_model(model)


@pytest.mark.parametrize(
    "argument",
    [
        {"s_aux": torch.ones(4)},
        {"position_bias": torch.ones(1)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"sliding_window": 7},
        {"something_new": 1},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_an_argument_that_is_not_implemented_raises(argument: dict[str, Any]) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    pool = KvPool(layout, 2, 4, torch.device("cpu"))
    work = Work(token_ids=[1, 2], start=0, block_table=[BlockId(1)])
    step = AttentionStep(
        pool=pool, batch=build_batch([work], 4, torch.device("cpu")), windows=[None]
    )
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query, key = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8)
    arguments = {STEP_ARGUMENT: step, "scaling": 1.0}
    output, _ = paged_attention(module, query, key, key, None, **arguments)
    assert output.shape == (1, 2, 4, 8)
    with pytest.raises(ModelRefused):
        paged_attention(module, query, key, key, None, **arguments, **argument)


def saved_model(path: Path) -> Path:
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(path)
    return path


def test_a_directory_loads_and_reports_its_progress(tmp_path: Path) -> None:
    stages: list[tuple[str, float]] = []
    loaded = load_model(
        str(saved_model(tmp_path)), progress=lambda name, done: stages.append((name, done))
    )
    assert loaded.max_context_tokens == 64
    assert loaded.windows == [None, None]
    assert [done for _, done in stages] == sorted(done for _, done in stages)
    assert stages[-1] == ("ready", 1.0)


def test_weights_without_safetensors_are_refused(tmp_path: Path) -> None:
    saved_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="no safetensors"):
        load_model(str(tmp_path))


def test_weights_that_were_cut_off_are_refused_in_one_line(tmp_path: Path) -> None:
    weights = saved_model(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    with pytest.raises(ModelRefused, match=r"damaged safetensors file.*cut off") as refused:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_weights_that_lack_a_layer_are_refused_and_not_made_up(tmp_path: Path) -> None:
    weights = saved_model(tmp_path) / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if "layers.1" not in name}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"no weights for model\.layers\.1.*missing in all"):
        load_model(str(tmp_path))


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="can't be loaded"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_check_at_load(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).to(dtype)
    assert prepare_model(model).layout.bytes_per_token == 2 * 2 * 2 * 8 * 2


def test_the_configured_bytes_are_those_of_the_tensors(
    tiny_models: Callable[[str], TinyModel],
) -> None:
    for family in ("llama", "qwen3", "gemma2"):
        model = tiny_models(family)
        pool = model.runner().pool
        assert pool.num_bytes == model.num_blocks * pool.layout.bytes_per_block(model.block_size)
