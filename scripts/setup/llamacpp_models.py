"""Write small GGUF models with random weights and another model's tokenizer.

    python -m scripts.setup.llamacpp_models MODEL.gguf FOLDER

The interpreter's environment must have llama.cpp's own package `gguf`. What a server keeps of a
prompt and gives back does not depend on what the weights have learned, so tests over a real server
need no more:

    full.gguf      every layer attends to everything
    window.gguf    sliding windows of 64 tokens in three layers of four
    hybrid.gguf    three short convolutions, whose state can't be cut back, and one attention layer
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np

WIDTH = 64
FORWARD = 128
NUM_LAYERS = 4
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS
CONTEXT = 32_768
WINDOW = 64
CONVOLUTION = 3
Shapes = Mapping[str, tuple[int, ...]]


def main(arguments: list[str]) -> int:
    source, target = map(Path, arguments)
    tokenizer = gguf.GGUFReader(source)
    for name, make in (("full", _full), ("window", _window), ("hybrid", _hybrid)):
        place = target / f"{name}.gguf"
        part = place.with_suffix(".part")
        architecture, shapes = make()
        _write(part, architecture, shapes, tokenizer)
        part.rename(place)
    return 0


def _full() -> tuple[str, Shapes]:
    layers = [_feed_forward(number) | _attention(number) for number in range(NUM_LAYERS)]
    return "llama", _joined(layers) | _norms(("attn_norm", "ffn_norm"))


def _window() -> tuple[str, Shapes]:
    layers = [_feed_forward(number) | _attention(number) for number in range(NUM_LAYERS)]
    names = ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm")
    return "olmo2", _joined(layers) | _norms(names)


def _hybrid() -> tuple[str, Shapes]:
    layers = list[dict[str, tuple[int, ...]]]()
    for number in range(NUM_LAYERS):
        layer = _feed_forward(number)
        if _is_attention(number):
            layer |= _attention(number)
            layer |= {f"blk.{number}.{name}.weight": (HEAD_WIDTH,) for name in _HEAD_NORMS}
        else:
            layer |= {
                f"blk.{number}.shortconv.conv.weight": (WIDTH, CONVOLUTION),
                f"blk.{number}.shortconv.in_proj.weight": (3 * WIDTH, WIDTH),
                f"blk.{number}.shortconv.out_proj.weight": (WIDTH, WIDTH),
            }
        layers.append(layer)
    return "lfm2", _joined(layers) | _norms(("attn_norm", "ffn_norm"))


_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")


def _is_attention(number: int) -> bool:
    """Of the hybrid's layers the last."""
    return number == NUM_LAYERS - 1


def _feed_forward(number: int) -> dict[str, tuple[int, ...]]:
    return {
        f"blk.{number}.ffn_gate.weight": (FORWARD, WIDTH),
        f"blk.{number}.ffn_up.weight": (FORWARD, WIDTH),
        f"blk.{number}.ffn_down.weight": (WIDTH, FORWARD),
    }


def _attention(number: int) -> dict[str, tuple[int, ...]]:
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    return {f"blk.{number}.{name}.weight": (WIDTH, WIDTH) for name in names}


def _norms(names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    numbers = range(NUM_LAYERS)
    return {f"blk.{number}.{name}.weight": (WIDTH,) for name in names for number in numbers}


def _joined(layers: list[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for layer in layers for name, shape in layer.items()}


def _write(place: Path, architecture: str, shapes: Shapes, source: gguf.GGUFReader) -> None:
    writer = gguf.GGUFWriter(place, architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FORWARD)
    writer.add_block_count(NUM_LAYERS)
    writer.add_head_count(HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "lfm2":
        writer.add_head_count_kv([HEADS * _is_attention(n) for n in range(NUM_LAYERS)])
        writer.add_shortconv_l_cache(CONVOLUTION)
    else:
        writer.add_head_count_kv(HEADS)
    if architecture == "olmo2":
        writer.add_sliding_window(WINDOW)
    for name, field in source.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    num_tokens = len(source.fields["tokenizer.ggml.tokens"].data)
    for name, tensor in _tensors(architecture, shapes, num_tokens):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(
    architecture: str, shapes: Shapes, num_tokens: int
) -> Iterator[tuple[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]]:
    draw = np.random.default_rng(1)
    last_norm = "token_embd_norm" if architecture == "lfm2" else "output_norm"
    whole = {
        "token_embd.weight": (num_tokens, WIDTH),
        "output.weight": (num_tokens, WIDTH),
        f"{last_norm}.weight": (WIDTH,),
        **shapes,
    }
    for name, shape in whole.items():
        if len(shape) == 1:
            yield name, np.ones(shape, np.float32)
        else:
            scale = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
            yield name, (scale * draw.standard_normal(shape)).astype(np.float32)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
