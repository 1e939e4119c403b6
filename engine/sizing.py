"""How much memory a model's keys and values take, computed from its config.json alone.

Per token: 2 (keys and values) x layers x KV heads x head dimension x bytes of one number. Layers
with a sliding window count in full, because the engine keeps the tokens outside the window and
masks them. With latent attention it is layers x (latent + rotated part) x bytes. Models that no
formula describes, such as those with state-space layers, are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES = (*DTYPE_BYTES, "fp8_e4m3", "int8", "int4")
"""What keys and values may be kept in (ENGINE_KV_DTYPE)."""
_INT4_GROUP = 32
GIB = 2**30

# The names of one field in different model families, the usual one first.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
# Fields of models whose memory the formula does not describe, and what each means if it is true.
_OTHER_MEMORY = {
    "num_kv_shared_layers": "layers that share keys and values",
    "global_head_dim": "layers of different head dimensions",
    "is_encoder_decoder": "an encoder",
    "block_configs": "layers of different shapes",
    "hybrid_override_pattern": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
}
_KEEPING_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


class NotSizable(ValueError):
    """The message says which field is missing, or why the formula does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """One token's keys and values. `num_windowed` of the layers see only the last `window` tokens.

    `head_bytes` are those of one head's keys. `num_planes` is 2, for keys and values, or 1 for the
    latents of multi-head latent attention, whose one head is a latent with its rotated part.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_bytes: int
    window: int | None = None
    num_windowed: int = 0
    num_planes: int = 2

    @property
    def bytes_per_token(self) -> int:
        return self.num_planes * self.num_layers * self.num_kv_heads * self.head_bytes


def int4_groups(head_dim: int) -> int:
    """Groups of channels with a scale of their own, of 32 channels where a head has such."""
    return head_dim // _INT4_GROUP if head_dim % _INT4_GROUP == 0 else 1


def head_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one head's keys of one token. Raises NotSizable for a type that can't keep them.

    `int8` has a scale of 2 bytes, `int4` a scale and a least value in 4 for each group.
    """
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype] * head_dim
    if dtype == "fp8_e4m3":
        return head_dim
    if dtype == "int8":
        return head_dim + 2
    if dtype != "int4":
        raise NotSizable(f"dtype: one of {', '.join(KV_DTYPES)}, not {dtype!r}")
    if head_dim % 2:
        raise NotSizable(f"head_dim: int4 needs an even number, not {head_dim}")
    return head_dim // 2 + 4 * int4_groups(head_dim)


def kv_size(config: Mapping[str, Any], dtype: str) -> KvSize:
    """The size of one token's keys and values, from a Hugging Face config.json. Raises NotSizable.

    `dtype` is one of KV_DTYPES.

    A multimodal model is sized by its `text_config`: only the text decoder keeps keys and values.
    """
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        config = nested
    if dtype not in KV_DTYPES:
        raise NotSizable(f"dtype: one of {', '.join(KV_DTYPES)}, not {dtype!r}")
    for field, meaning in _OTHER_MEMORY.items():
        if config.get(field):
            raise NotSizable(f"{field}: the model has {meaning}")
    kinds = config.get("layer_types")
    if others := set(kinds or ()) - _KEEPING_LAYERS:
        raise NotSizable(f"layer_types: not known how much {', '.join(sorted(others))} keeps")
    num_layers, num_heads = _number(config, _NUM_LAYERS), _number(config, _NUM_HEADS)
    num_kv_heads = num_heads
    if config.get("kv_lora_rank"):
        rotated = _number(config, ("qk_rope_head_dim",))
        num_kv_heads, head_dim = 1, _number(config, ("kv_lora_rank",)) + rotated
    else:
        if _given(config, _NUM_KV_HEADS) is not None:
            num_kv_heads = _number(config, _NUM_KV_HEADS)
        # Falcon's newer decoder has grouped heads whatever `multi_query` says.
        elif config.get("multi_query") and not config.get("new_decoder_architecture"):
            num_kv_heads = 1
        # Qwen3's is not hidden size / heads.
        if config.get("head_dim") is not None:
            head_dim = _number(config, ("head_dim",))
        else:
            head_dim, rest = divmod(_number(config, _HIDDEN_SIZE), num_heads)
            if rest:
                raise NotSizable(
                    "head_dim: not given, and the hidden size is no multiple of the heads"
                )
    window = config.get("sliding_window")
    num_windowed = num_layers if kinds is None else list(kinds).count("sliding_attention")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        num_windowed = 0
    return KvSize(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_bytes=head_bytes(head_dim, dtype),
        window=window if num_windowed else None,
        num_windowed=num_windowed,
        num_planes=1 if config.get("kv_lora_rank") else 2,
    )


def _given(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _given(config, names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NotSizable(f"{names[0]}: a positive number is needed, not {value!r}")
    return value
