"""A native model so small that only the accounting takes time.

Random weights, the demo model's tokenizer, and its chat template with thinking rendered, so that
every kind of block takes room. Its end-of-turn token is never the likeliest: asked greedily, it
ends a turn at `max_tokens` only.
"""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3_5TextConfig

DEMO_MODEL = Path(__file__).resolve().parents[2] / "engine" / "holdfast-demo"
KV_BYTES_PER_TOKEN = 128
_TURN = "{{- text(message.content) -}}"
_THINKING = (
    "{%- if message.reasoning_content -%}"
    "{{- '<think>' + message.reasoning_content + '</think>' -}}"
    "{%- endif -%}"
)


def write_tiny_model(directory: Path, head_dim: int = 16, *, is_hybrid: bool = False) -> Path:
    """Make the directory, named like the model it holds; returns it.

    vLLM's attention on a CPU takes heads of 32 and more. A hybrid has a linear layer below.
    """
    directory.mkdir(parents=True)
    torch.manual_seed(11)
    shape = {
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2 if is_hybrid else 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "max_position_embeddings": 65_536,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    config: PretrainedConfig = LlamaConfig(**shape)
    if is_hybrid:
        config = Qwen3_5TextConfig(
            **shape,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.lm_head.weight[config.eos_token_id] = 0
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    assert _TURN in template
    (directory / "chat_template.jinja").write_text(template.replace(_TURN, _THINKING + _TURN))
    return directory
