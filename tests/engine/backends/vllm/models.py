"""Models so small that vLLM's CPU build runs them in a moment: random weights, our tokenizer."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

DEMO_MODEL = Path(__file__).resolve().parents[4] / "engine" / "holdfast-demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCAB_SIZE = 4096
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the least that vLLM's CPU attention takes
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


def write_llama(directory: Path) -> Path:
    """Full attention in all layers; returns the directory."""
    torch.manual_seed(11)
    return _write(LlamaForCausalLM, LlamaConfig(num_hidden_layers=2, **SHAPE), directory)


def write_gemma(directory: Path) -> Path:
    """Gemma 3's way: three layers with a window of 64 tokens, one with full attention."""
    torch.manual_seed(11)
    config = Gemma3TextConfig(
        num_hidden_layers=4,
        sliding_window=64,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        query_pre_attn_scalar=32,
        **SHAPE,
    )
    return _write(Gemma3ForCausalLM, config, directory)


def write_qwen3_next(directory: Path) -> Path:
    """A hybrid: two layers with a recurrent state, one with full attention.

    Heads of 128 are the only ones that vLLM's CPU kernels of such layers take.
    """
    torch.manual_seed(11)
    config = Qwen3NextConfig(
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **SHAPE,
    )
    return _write(Qwen3NextForCausalLM, config, directory)


def write_idefics(directory: Path) -> Path:
    """Sees images, in tiles of 56 × 56 pixels: its processor needs no torchvision."""
    torch.manual_seed(11)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    special = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    shape = {**SHAPE, "vocab_size": VOCAB_SIZE + 64}
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        text_config=LlamaConfig(num_hidden_layers=2, **shape),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    _write(Idefics3ForConditionalGeneration, config, directory)
    processor: Any = Idefics3Processor
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    processor(images, tokenizer, image_seq_len=4).save_pretrained(directory)
    return directory


def _write(kind: Any, config: Any, directory: Path) -> Path:
    kind(config).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, directory / name)
    return directory
