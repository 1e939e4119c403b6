"""How much memory a model's keys and values take, computed from its config.json alone.

Per token: 2 (keys and values) x layers x KV heads x head dimension x bytes of one number. Layers
with a sliding window count in full, because the engine keeps the tokens outside the window and
masks them. With latent attention it is layers x (latent + rotated part) x bytes.

A linear layer keeps one state of each sequence, whatever its length: what its convolution has seen
last (channels x kernel, in the model's type), and its recurrence (heads x key dimension x value
dimension, in 32 bits). Models that no formula describes are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES = (*DTYPE_BYTES, "fp8_e4m3", "int8", "int4")
"""What keys and values may be kept in (ENGINE_KV_DTYPE)."""
_INT4_GROUP = 32
GIB = 2**30


def blocks_for(amount: int, block_size: int) -> int:
    """How many blocks hold so many tokens, or bytes; the last block may not be full."""
    return (amount + block_size - 1) // block_size


def aligned(amount: int, alignment: int) -> int:
    """The least multiple of the alignment that is at least the amount."""
    return blocks_for(amount, alignment) * alignment


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
}
# The same where the configuration does not say which of its layers keep a state.
STATES = {
    "hybrid_override_pattern": "state-space layers",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
}
_KEEPING_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_LINEAR_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "mamba"})
_OTHER_LAYERS = frozenset({"mlp", "moe"})


class NotSizable(ValueError):
    """The message says which field is missing, or why the formula does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSize:
    """The sizes of a model's keys and values."""

    # Layers that keep keys and values.
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # The bytes of one head's keys of one token.
    head_bytes: int
    # The number of last tokens that a windowed layer sees.
    window: int | None = None
    # How many of the layers are windowed.
    num_windowed: int = 0
    # 2, for keys and values. 1 for multi-head latent attention, whose one head is a latent with its
    # rotated part.
    num_planes: int = 2
    # The bytes of one recurrent state.
    state_bytes: int = 0

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
    kinds = _layer_kinds(config)
    _check_is_described(config, set(kinds))
    linear = [kind for kind in kinds if kind in _LINEAR_LAYERS]
    num_layers = sum(kind in _KEEPING_LAYERS or kind == "hybrid" for kind in kinds)
    if not kinds:
        num_layers = _number(config, _NUM_LAYERS)
    num_heads = _number(config, _NUM_HEADS)
    num_kv_heads = num_heads
    if config.get("kv_lora_rank"):
        rotated = _number(config, ("qk_rope_head_dim",))
        num_kv_heads = 1
        head_dim = _number(config, ("kv_lora_rank",)) + rotated
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
    num_windowed = kinds.count("sliding_attention") if kinds else num_layers
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
        state_bytes=len(linear) * _layer_state_bytes(config, linear[0], dtype) if linear else 0,
    )


def _check_is_described(config: Mapping[str, Any], kinds: set[str]) -> None:
    described = _OTHER_MEMORY | ({} if kinds & _LINEAR_LAYERS else STATES)
    for field, meaning in described.items():
        if config.get(field):
            raise NotSizable(f"{field}: the model has {meaning}")
    has_attention = kinds & (_KEEPING_LAYERS | {"hybrid"})
    described_kinds = _KEEPING_LAYERS | (_LINEAR_LAYERS | _OTHER_LAYERS if has_attention else set())
    others = kinds - described_kinds
    if others:
        raise NotSizable(f"layer_types: not known how much {', '.join(sorted(others))} keeps")


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer, as far as the configuration says."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds:
        return list(kinds)
    attending = config.get("attn_layer_indices")
    count = config.get("num_hidden_layers")
    if attending and isinstance(count, int):  # Bamba
        return [
            "full_attention" if layer in attending else "linear_attention" for layer in range(count)
        ]
    # Each layer of Falcon-H1 has both.
    return ["hybrid"] * count if config.get("mamba_d_ssm") and isinstance(count, int) else []


def _layer_state_bytes(config: Mapping[str, Any], kind: str, dtype: str) -> int:
    """One linear layer's state of one sequence: Gated DeltaNet, KDA, Mamba2 or a convolution."""
    number_bytes = DTYPE_BYTES.get(dtype, 2)
    kernel: tuple[str, ...]
    if kind == "conv":
        width = _number(config, ("conv_L_cache",))
        return _number(config, _HIDDEN_SIZE) * width * number_bytes
    if config.get("linear_num_value_heads"):
        heads = _number(config, ("linear_num_value_heads",))
        key, value = (_number(config, (f"linear_{part}_head_dim",)) for part in ("key", "value"))
        channels = 2 * _number(config, ("linear_num_key_heads",)) * key + heads * value
        kernel = ("linear_conv_kernel_dim",)
    elif config.get("linear_num_heads"):
        heads = _number(config, ("linear_num_heads",))
        key = value = _number(config, ("linear_head_dim",))
        channels = 3 * heads * key
        kernel = ("linear_conv_kernel_dim", "short_conv_kernel_size")
    else:
        heads = _number(config, ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"))
        value = _number(config, ("mamba_d_head", "mamba_head_dim", "mamba_headdim"))
        key = _number(config, ("mamba_d_state", "ssm_state_size"))
        groups = _number(config, ("mamba_n_groups", "n_groups", "mamba_ngroups"))
        channels = heads * value + 2 * groups * key
        kernel = ("mamba_d_conv", "conv_kernel")
    return channels * _number(config, kernel) * number_bytes + heads * key * value * 4


def _given(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _given(config, names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NotSizable(f"{names[0]}: a positive number is needed, not {value!r}")
    return value
