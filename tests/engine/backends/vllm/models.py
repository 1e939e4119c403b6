"""Models so small that vLLM's CPU build runs them in a moment: random weights, our tokenizer."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SiglipVisionConfig,
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
SEEING: dict[str, Any] = {**SHAPE, "vocab_size": VOCAB_SIZE + 64}
VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
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


def write_idefics(directory: Path, **more: Any) -> Path:
    """Sees images, in tiles of 56 × 56 pixels: its processor needs no torchvision."""
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer, ids = _seeing_tokenizer(names)
    config = Idefics3Config(
        vision_config=VISION,
        text_config=LlamaConfig(num_hidden_layers=2, **{**SEEING, **more}),
        image_token_id=ids[0],
        scale_factor=2,
        pad_token_id=0,
    )
    _write_seeing(Idefics3ForConditionalGeneration, config, tokenizer, directory, "<image>")
    processor: Any = Idefics3Processor
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
    )
    template = (directory / "chat_template.jinja").read_text()
    processor(images, tokenizer, image_seq_len=4).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def write_gemma3(directory: Path) -> Path:
    """Joins an image's line breaks with the text's; its window is shorter than a prompt."""
    names = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer, ids = _seeing_tokenizer(names)
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])
    config = Gemma3Config(
        text_config=Gemma3TextConfig(
            num_hidden_layers=4,
            sliding_window=64,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            query_pre_attn_scalar=32,
            **SEEING,
        ),
        vision_config=SiglipVisionConfig(**{**VISION, "image_size": 112, "vision_use_head": False}),
        mm_tokens_per_image=64,
        boi_token_index=ids[0],
        eoi_token_index=ids[1],
        image_token_index=ids[2],
    )
    _write_seeing(Gemma3ForConditionalGeneration, config, tokenizer, directory, names[0])
    # As those that Google published are named.
    weights = load_file(directory / "model.safetensors")
    old = "vision_tower."
    named = {name.replace(old, f"{old}vision_model."): tensor for name, tensor in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    places = {"boi_token": names[0], "eoi_token": names[1], "image_token": names[2]}
    size = {"height": 112, "width": 112}
    whole = {"image_seq_length": 64}
    _write_processor(directory, "Gemma3", "Gemma3", {"size": size, **whole}, whole, places)
    return directory


def write_qwen2_vl(directory: Path) -> Path:
    """Four patches are a token, with positions of three kinds."""
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer, ids = _seeing_tokenizer(names)
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    config = Qwen2VLConfig(
        text_config={**SEEING, "num_hidden_layers": 2, "rope_parameters": rope},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2},
        vision_start_token_id=ids[0],
        image_token_id=ids[1],
        vision_end_token_id=ids[2],
        video_token_id=ids[3],
        tie_word_embeddings=False,
    )
    place = "".join(names[:3])
    _write_seeing(Qwen2VLForConditionalGeneration, config, tokenizer, directory, place)
    size = {"shortest_edge": 28 * 28, "longest_edge": 64 * 28 * 28}
    _write_processor(directory, "Qwen2VL", "Qwen2VL", {"size": size, "patch_size": 14})
    return directory


def write_internvl(directory: Path) -> Path:
    names = ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
    tokenizer, ids = _seeing_tokenizer(names)
    config = InternVLConfig(
        vision_config={**VISION, "image_size": [112, 112], "patch_size": [14, 14]},
        text_config=Qwen2Config(num_hidden_layers=2, **SEEING),
        image_token_id=ids[2],
        image_seq_length=16,
    )
    _write_seeing(InternVLForConditionalGeneration, config, tokenizer, directory, names[2])
    kinds = ("start_image_token", "end_image_token", "context_image_token", "video_token")
    size = {"size": {"height": 112, "width": 112}, "crop_to_patches": True, "max_patches": 4}
    places = dict(zip(kinds, names, strict=True))
    _write_processor(directory, "InternVL", "GotOcr2", size, {"image_seq_length": 16}, places)
    return directory


def write_mistral3(directory: Path) -> Path:
    """Rows of patches with a token behind each; vLLM names no text that stands for an image."""
    tokenizer, ids = _seeing_tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**{**VISION, "image_size": 224}),
        text_config=MistralConfig(num_hidden_layers=2, sliding_window=None, **SEEING),
        image_token_index=ids[0],
        spatial_merge_size=2,
    )
    _write_seeing(Mistral3ForConditionalGeneration, config, tokenizer, directory, "[IMG]")
    patch = {"size": {"longest_edge": 224}, "patch_size": {"height": 14, "width": 14}}
    merged = {"patch_size": 14, "spatial_merge_size": 2}
    _write_processor(directory, "Pixtral", "Pixtral", patch, merged)
    return directory


SEEING_MODELS: dict[str, Callable[[Path], Path]] = {
    "gemma3": write_gemma3,
    "internvl": write_internvl,
    "mistral3": write_mistral3,
    "qwen2_vl": write_qwen2_vl,
}
"""Their processors need torchvision."""


def _seeing_tokenizer(names: list[str]) -> tuple[Any, list[int]]:
    torch.manual_seed(11)
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer, tokenizer.convert_tokens_to_ids(names)


def _write_seeing(kind: Any, config: Any, tokenizer: Any, directory: Path, place: str) -> None:
    """As models that see have it: the template shows an image among texts, at its `place`."""
    kind(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    template = (DEMO_MODEL / "chat_template.jinja").read_text()
    part = "{{ part.text }}"
    choice = f"{{%- if part.type == 'image' -%}}{place}{{%- else -%}}{part}{{%- endif -%}}"
    (directory / "chat_template.jinja").write_text(template.replace(part, choice))


def _write_processor(
    directory: Path,
    name: str,
    images: str,
    image: Mapping[str, Any],
    whole: Mapping[str, Any] | None = None,
    tokens: Mapping[str, str] | None = None,
) -> None:
    """By hand: without torchvision there is no processor to save. `tokens` go by their use."""
    processor = f"{name}Processor"
    preparing = {"image_processor_type": f"{images}ImageProcessor", "processor_class": processor}
    files: dict[str, Mapping[str, Any]] = {
        "preprocessor_config.json": {**image, **preparing},
        "video_preprocessor_config.json": {
            **image,
            "video_processor_type": f"{name}VideoProcessor",
        },
        "processor_config.json": {**(whole or {}), "processor_class": processor},
    }
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "extra_special_tokens": tokens or {}}))


def _write(kind: Any, config: Any, directory: Path) -> Path:
    kind(config).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_MODEL / name, directory / name)
    return directory
