"""The demo model as a GGUF file, for llama.cpp. Needs the packages `gguf` and `numpy`.

    python -m scripts.demo_model.to_gguf --out demo.gguf

The vocabulary's ids stay what they are; llama.cpp's rule for cutting text into words is another
than the demo tokenizer's. That is no matter where token ids are sent.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]
import numpy as np

MODEL = Path(__file__).parents[2] / "engine" / "demo_model"
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    config = json.loads((MODEL / "config.json").read_bytes())
    writer = gguf.GGUFWriter(str(options.out), "llama")
    write_shape(writer, config)
    write_vocabulary(writer, config)
    for name, tensor in tensors(MODEL / "model.safetensors"):
        writer.add_tensor(gguf_name(name), permuted(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("demo_model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def write_vocabulary(writer: Any, config: dict[str, Any]) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_bytes())
    tokens = [f"<unused{i}>" for i in range(config["vocab_size"])]
    kinds = [int(gguf.TokenType.UNUSED)] * len(tokens)
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token], kinds[token] = text, int(gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        kind = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], int(kind)
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template((MODEL / "chat_template.jinja").read_text("utf-8"))


def tensors(path: Path) -> list[tuple[str, Any]]:
    """Every tensor of a safetensors file of bfloat16 or float32, as float32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    found = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + offset for offset in about["data_offsets"])
        if about["dtype"] == "BF16":
            words = np.frombuffer(data[start:end], dtype=np.uint16).astype(np.uint32) << 16
            values = words.view(np.float32)
        else:
            values = np.frombuffer(data[start:end], dtype=np.float32)
        found.append((name, values.reshape(about["shape"])))
    return found


def gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def permuted(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """llama.cpp turns pairs of neighbours, and `transformers` the two halves of a head."""
    heads = {
        "q_proj.weight": config["num_attention_heads"],
        "k_proj.weight": config["num_key_value_heads"],
    }.get(".".join(name.split(".")[-2:]))
    if heads is None:
        return np.ascontiguousarray(tensor)
    rows, columns = tensor.shape
    halves = tensor.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


if __name__ == "__main__":
    main()
