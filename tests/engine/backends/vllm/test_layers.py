"""What layers keep, and what is refused. Nothing here needs vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm.backend import kv_bytes
from engine.backends.vllm.internals import check_layers

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK = {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "model", "cache", "wanted"),
    [
        (LLAMA, "bfloat16", "auto", 131_072),
        (LLAMA, "bfloat16", "fp8", 65_536),
        (LLAMA, "float32", "bfloat16", 131_072),
        (DEEPSEEK, "bfloat16", "auto", 61 * 576 * 2),
        (DEEPSEEK, "bfloat16", "fp8_e4m3", 61 * 576),
        ({"text_config": DEEPSEEK}, "bfloat16", "auto", 61 * 576 * 2),
        (DEEPSEEK, "bfloat16", "fp8_ds_mla", 0),
        ({**LLAMA, "ssm_state_size": 16}, "bfloat16", "auto", 0),
    ],
)
def test_bytes_of_a_token_follow_the_caches_type_and_the_kind_of_attention(
    config: dict[str, Any], model: str, cache: str, wanted: int
) -> None:
    assert kv_bytes(config, model, cache) == wanted


def group(kind: str, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=type(kind, (), fields)())


def test_states_are_refused_by_name() -> None:
    check_layers([group("FullAttentionSpec"), group("SlidingWindowSpec")])
    with pytest.raises(ValueError, match=r"MambaSpec \(layers.0"):
        check_layers([group("FullAttentionSpec"), group("MambaSpec")])


def test_a_state_inside_a_group_of_several_shapes_is_refused_too() -> None:
    inner = {"a": group("FullAttentionSpec").kv_cache_spec, "b": group("MambaSpec").kv_cache_spec}
    with pytest.raises(ValueError, match="MambaSpec"):
        check_layers([group("UniformTypeKVCacheSpecs", kv_cache_specs=inner)])
