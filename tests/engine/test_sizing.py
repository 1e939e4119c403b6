"""What the sizing says against the pool's real tensors and the published example."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from engine.compute.kv import KvPool
from engine.compute.loading import prepare_model
from engine.sizing import NotSizable, kv_size

SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 3,
}
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE, num_key_value_heads=8),
        LlamaConfig(**SHAPE, num_key_value_heads=1),
        Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
        MistralConfig(**SHAPE, num_key_value_heads=4, sliding_window=24),
        DeepseekV3Config(**SHAPE, **LATENTS),
    ],
    ids=["llama", "multi-query", "qwen3-own-head-dim", "mistral-window", "latents"],
)
def test_the_size_is_that_of_the_pools_tensors(config: PretrainedConfig, dtype: str) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    layout = prepare_model(model, "sdpa").layout
    pool = KvPool(layout, num_blocks=7, block_size=4, device=torch.device("cpu"))
    size = kv_size(config.to_dict(), dtype)
    assert size.bytes_per_token * 7 * 4 == pool.num_bytes


def test_the_published_example() -> None:
    """Llama-3-8B, 8,192 tokens, fp16: 1.07 GB; also as the text decoder of a larger model."""
    size = kv_size(LLAMA_3_8B, "float16")
    assert size.bytes_per_token == 131_072
    assert 8192 * size.bytes_per_token == 1_073_741_824
    nested = kv_size({"model_type": "some_vl", "text_config": LLAMA_3_8B}, "float16")
    assert nested.bytes_per_token == 131_072


def test_heads_that_are_not_given_are_one_per_attention_head_and_of_multi_query_one() -> None:
    config = {name: value for name, value in LLAMA_3_8B.items() if name != "num_key_value_heads"}
    assert kv_size(config, "float16").num_kv_heads == 32
    falcon = {"hidden_size": 4544, "n_head": 71, "n_layer": 32, "multi_query": True}
    size = kv_size(falcon, "bfloat16")
    assert (size.num_kv_heads, size.head_dim, size.bytes_per_token) == (1, 64, 2 * 32 * 64 * 2)


@pytest.mark.parametrize(
    ("fields", "window", "num_windowed"),
    [
        ({"sliding_window": 4096}, 4096, 32),
        ({"sliding_window": None}, None, 0),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, 0),
        ({"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 16}, 9, 16),
    ],
    ids=["everywhere", "none", "turned-off", "every-other-layer"],
)
def test_windows_are_noted_and_count_in_full(
    fields: dict[str, Any], window: int | None, num_windowed: int
) -> None:
    size = kv_size(LLAMA_3_8B | fields, "float16")
    assert (size.window, size.num_windowed) == (window, num_windowed)
    assert size.bytes_per_token == 131_072


def test_of_latent_attention_the_latents_count() -> None:
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    # DeepSeek V3's 61 layers: 70,272 bytes a token in 16 bits (arXiv 2505.09343, table 1).
    size = kv_size(LLAMA_3_8B | latents | {"num_hidden_layers": 61}, "bfloat16")
    assert size.bytes_per_token == 70_272


@pytest.mark.parametrize(
    ("fields", "dtype", "message"),
    [
        ({"kv_lora_rank": 512}, "float16", "qk_rope_head_dim"),
        ({"layer_types": ["linear_attention"]}, "float16", "linear_attention"),
        ({"num_hidden_layers": None}, "float16", "num_hidden_layers"),
        ({"num_attention_heads": 0}, "float16", "num_attention_heads"),
        ({"num_key_value_heads": [1, 2]}, "float16", "num_key_value_heads"),
        ({"hidden_size": 100}, "float16", "head_dim"),
        ({}, "int3", "dtype"),
    ],
)
def test_what_the_formula_does_not_describe_is_refused(
    fields: dict[str, Any], dtype: str, message: str
) -> None:
    with pytest.raises(NotSizable, match=message):
        kv_size(LLAMA_3_8B | fields, dtype)
