"""Write small models as llama.cpp reads them, with the tokenizer of our demo model.

    python -m scripts.setup.llamacpp_models FOLDER

    full.gguf      the demo model (`engine/holdfast-demo`): every layer attends to everything
    window.gguf    sliding windows of 64 tokens in three layers of four
    hybrid.gguf    three short convolutions, whose state can't be cut back, and one attention layer

The last two have random weights: what a server keeps of a prompt and gives back does not depend on
what they have learned. The interpreter's environment must have llama.cpp's own package `gguf`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

DEMO = Path(__file__).resolve().parents[2] / "engine" / "holdfast-demo"
CONTEXT = 65_536
WIDTH = 64
FORWARD = 128
NUM_LAYERS = 4
HEADS = 4
HEAD_WIDTH = WIDTH // HEADS
WINDOW = 64
CONVOLUTION = 3
Array = np.ndarray[Any, np.dtype[np.float32]]
Tensors = dict[str, Array]
OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face's names of a Llama's tensors, and llama.cpp's."""


def main(arguments: list[str]) -> int:
    (target,) = map(Path, arguments)
    for name, write in (
        ("full", _write_full),
        ("window", _write_window),
        ("hybrid", _write_hybrid),
    ):
        part = target / f"{name}.part"
        write(part)
        part.rename(part.with_suffix(".gguf"))
    return 0


def _write_full(place: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text("utf-8"))
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    writer = gguf.GGUFWriter(place, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    weights = _weights(DEMO / "model.safetensors")
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for number in range(config["num_hidden_layers"]):
        for theirs, name in OF_A_LAYER.items():
            tensor = weights[f"model.layers.{number}.{theirs}.weight"]
            if name in ("attn_q", "attn_k"):
                tensor = _interleaved(tensor, heads if name == "attn_q" else kv_heads)
            tensors[f"blk.{number}.{name}.weight"] = tensor
    _finish(writer, tensors)


def _interleaved(tensor: Array, heads: int) -> Array:
    """The rows of each head in the order of llama.cpp's rotary embedding, which turns neighbours;
    Hugging Face's turns the halves."""
    rows, columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def _write_window(place: Path) -> None:
    writer = _small(place, "olmo2", [HEADS] * NUM_LAYERS)
    writer.add_sliding_window(WINDOW)
    tensors = _ends("output_norm")
    for number in range(NUM_LAYERS):
        tensors |= _feed_forward(number) | _attention(number)
        for name in ("attn_q_norm", "attn_k_norm", "post_attention_norm", "post_ffw_norm"):
            tensors[f"blk.{number}.{name}.weight"] = np.ones(WIDTH, np.float32)
    _finish(writer, tensors)


def _write_hybrid(place: Path) -> None:
    is_attention = [number == NUM_LAYERS - 1 for number in range(NUM_LAYERS)]
    writer = _small(place, "lfm2", [HEADS if is_its else 0 for is_its in is_attention])
    writer.add_shortconv_l_cache(CONVOLUTION)
    tensors = _ends("token_embd_norm")
    for number in range(NUM_LAYERS):
        tensors |= _feed_forward(number)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{number}.{name}.weight"] = np.ones(WIDTH, np.float32)
        if is_attention[number]:
            tensors |= _attention(number)
            for name in ("attn_q_norm", "attn_k_norm"):
                tensors[f"blk.{number}.{name}.weight"] = np.ones(HEAD_WIDTH, np.float32)
        else:
            part = f"blk.{number}.shortconv"
            tensors[f"{part}.conv.weight"] = _drawn(f"{part}.conv", WIDTH, CONVOLUTION)
            tensors[f"{part}.in_proj.weight"] = _drawn(f"{part}.in", 3 * WIDTH, WIDTH)
            tensors[f"{part}.out_proj.weight"] = _drawn(f"{part}.out", WIDTH, WIDTH)
    _finish(writer, tensors)


def _small(place: Path, architecture: str, kv_heads: list[int]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(place, architecture)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FORWARD)
    writer.add_block_count(NUM_LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def _ends(norm: str) -> Tensors:
    num_tokens = len(_tokens())
    return {
        "token_embd.weight": WIDTH**0.5 * _drawn("tokens", num_tokens, WIDTH),
        "output.weight": _drawn("output", num_tokens, WIDTH),
        f"{norm}.weight": np.ones(WIDTH, np.float32),
    }


def _feed_forward(number: int) -> Tensors:
    shapes = {
        "ffn_gate": (FORWARD, WIDTH),
        "ffn_up": (FORWARD, WIDTH),
        "ffn_down": (WIDTH, FORWARD),
    }
    names = {f"blk.{number}.{name}": shape for name, shape in shapes.items()}
    return {f"{name}.weight": _drawn(name, *shape) for name, shape in names.items()}


def _attention(number: int) -> Tensors:
    names = [f"blk.{number}.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_output")]
    return {f"{name}.weight": _drawn(name, WIDTH, WIDTH) for name in names}


def _drawn(name: str, rows: int, columns: int) -> Array:
    """Random weights, the same at each call of a name."""
    draw = np.random.default_rng(list(name.encode()))
    weights: Array = draw.standard_normal((rows, columns), np.float32)
    weights *= columns**-0.5
    return weights


def _finish(writer: gguf.GGUFWriter, tensors: Tensors) -> None:
    """Write what all models have, and the file."""
    writer.add_context_length(CONTEXT)
    writer.add_rope_freq_base(100_000.0)
    content = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(_tokens()))
    writer.add_token_types(list(_tokens().values()))
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tokens() -> Mapping[str, int]:
    """The tokens of the demo model in their order, with llama.cpp's types of them."""
    content = json.loads((DEMO / "tokenizer.json").read_text("utf-8"))
    vocabulary: dict[str, int] = content["model"]["vocab"]
    types = dict.fromkeys(vocabulary, gguf.TokenType.NORMAL)
    numbers = dict(vocabulary)
    for token in content["added_tokens"]:
        name = token["content"]
        numbers[name] = token["id"]
        is_control = token["special"]
        types[name] = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
    return {name: int(types[name]) for name in sorted(numbers, key=lambda name: numbers[name])}


def _weights(place: Path) -> Tensors:
    """All tensors of a file of safetensors, which are in bfloat16: a float's upper half."""
    content = place.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    tensors = dict[str, Array]()
    for name, about in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        assert about["dtype"] == "BF16", name
        halves = np.frombuffer(content[begin + first : begin + last], np.uint16)
        whole = halves.astype(np.uint32) << 16
        tensors[name] = whole.view(np.float32).reshape(about["shape"])
    return tensors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
