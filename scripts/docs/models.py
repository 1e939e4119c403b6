"""Which architectures the native engine serves: engine/MODELS.md, by trying each.

    python -m scripts.docs.models > engine/MODELS.md

Each is made tiny, with random weights, and checked as at every start: its logits through our paged
attention, chunk by chunk, against transformers' own forward. Takes about a minute.
"""

import sys
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers import __version__ as version

from engine.compute.errors import ModelRefused
from engine.compute.loading import prepare_model

_HEAD = f"""# Models of the native engine

Made by `python -m scripts.docs.models` with transformers {version}: tiny random models of each
architecture, float32, checked as at every start. A checkpoint that also sees or hears is served by
its text decoder. *State*: entries have a recurrent state ([hybrids](README.md#computation)).

| architecture | native engine |
|---|---|"""
_SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 64,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 8,
}
_MIXED = ["linear_attention", "full_attention"] * 2
_CONVOLVED = ["conv", "full_attention"] * 2
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
_ALIKE = """
llama mistral ministral3 mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text
gemma4_text phi phi3 olmo2 olmo3 granite granitemoe cohere cohere2 starcoder2 gpt_oss glm glm4
glm4_moe ernie4_5 ernie4_5_moe minimax_m2 mimo_v2_flash smollm3 exaone4 gpt_neox apertus seed_oss
arcee bitnet stablelm falcon llama4_text
"""
_OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT | {"q_lora_rank": 32},
    "glm4_moe_lite": _LATENT,
    "youtu": _LATENT,
    "qwen3_next": {"layer_types": _MIXED},
    "qwen3_5_text": {"layer_types": _MIXED},
    "qwen3_5_moe_text": {"layer_types": _MIXED},
    "kimi_linear": {"num_key_value_heads": 4, "layer_types": _MIXED, "num_experts_per_token": 2},
    "lfm2": {"layer_types": _CONVOLVED},
    "lfm2_moe": {"layer_types": _CONVOLVED, "num_dense_layers": 1},
    "minicpm3": _LATENT | {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3], "mamba_expand": 2},
    "granitemoehybrid": _MAMBA | {"layer_types": _MIXED, "shared_intermediate_size": 64},
    "falcon_h1": _MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"]},
    "mamba": {"num_hidden_layers": 2},
}
_ARCHITECTURES = {name: dict[str, Any]() for name in _ALIKE.split()} | _OTHERS


def row_of(architecture: str) -> str:
    """`served`, or why not."""
    kind = CONFIG_MAPPING[architecture]
    fields = kind().to_dict()
    asked = {name: value for name, value in _SMALL.items() if fields.get(name) is not None}
    torch.manual_seed(7)
    try:
        config = kind(**asked | _ARCHITECTURES[architecture])
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for weight in model.parameters():
                weight.nan_to_num_()  # what transformers leaves uninitialised
        layout = prepare_model(model.eval().float(), "sdpa").layout
    except ModelRefused as refusal:
        return f"refused: {refusal}"
    words = ["served", "latents" * bool(layout.latent_rank), "state" * bool(layout.state_parts)]
    return ", ".join(word for word in words if word)


def main() -> int:
    print(_HEAD)
    for architecture in sorted(_ARCHITECTURES):
        print(f"| `{architecture}` | {row_of(architecture)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
