"""How much memory a model's keys and values take, computed from its config.json alone.

Per token: 2 (keys and values) x layers x KV heads x head dimension x bytes of one number. Layers
with a sliding window count in full, because the engine keeps the tokens outside the window and
masks them. Models that the formula does not describe (latent attention, state-space layers) are
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30

# The names of one field in different model families, the usual one first.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
# Fields of models whose memory the formula does not describe, and what each means if it is true.
_OTHER_MEMORY = {
    "kv_lora_rank": "multi-head latent attention",
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

    `is_nested`: the numbers are those of the text decoder inside a larger model.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_number: int
    window: int | None = None
    num_windowed: int = 0
    is_nested: bool = False

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_number

    @property
    def tokens_per_gib(self) -> int:
        return GIB // self.bytes_per_token

    def num_blocks(self, memory_bytes: int, block_size: int) -> int:
        """The number of blocks that fit into so much memory."""
        return memory_bytes // (block_size * self.bytes_per_token)

    def num_leases(
        self, lease_tokens: int, *, memory_bytes: int, block_size: int, lease_share: float
    ) -> int:
        """How many leases of this size a pool holds, if they share no blocks.

        The budget is counted in blocks, and a lease holds its last block whole.
        """
        budget = int(self.num_blocks(memory_bytes, block_size) * lease_share)
        return budget // -(-lease_tokens // block_size)


def kv_size(config: Mapping[str, Any], dtype: str) -> KvSize:
    """The size of one token's keys and values, from a Hugging Face config.json. Raises NotSizable.

    A multimodal model is sized by its `text_config`: only the text decoder keeps keys and values.
    """
    nested = config.get("text_config")
    is_nested = isinstance(nested, Mapping)
    if isinstance(nested, Mapping):
        config = nested
    if dtype not in DTYPE_BYTES:
        raise NotSizable(f"dtype: one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
    _check_is_described(config)
    num_layers = _number(config, _NUM_LAYERS)
    num_heads = _number(config, _NUM_HEADS)
    window, num_windowed = _windows(config, num_layers)
    return KvSize(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, num_heads),
        bytes_per_number=DTYPE_BYTES[dtype],
        window=window,
        num_windowed=num_windowed,
        is_nested=is_nested,
    )


def _check_is_described(config: Mapping[str, Any]) -> None:
    for field, meaning in _OTHER_MEMORY.items():
        if config.get(field):
            raise NotSizable(f"{field}: the model has {meaning}")
    others = set(config.get("layer_types") or ()) - _KEEPING_LAYERS
    if others:
        raise NotSizable(f"layer_types: not known how much {', '.join(sorted(others))} keeps")


def _num_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    """The given number, 1 with multi-query attention, else one for each query head."""
    if _given(config, _NUM_KV_HEADS) is not None:
        return _number(config, _NUM_KV_HEADS)
    # Falcon's newer decoder has grouped heads whatever `multi_query` says.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return num_heads


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    """The given dimension (Qwen3's is not hidden size / heads), else hidden size / heads."""
    if config.get("head_dim") is not None:
        return _number(config, ("head_dim",))
    head_dim, rest = divmod(_number(config, _HIDDEN_SIZE), num_heads)
    if rest:
        raise NotSizable("head_dim: not given, and the hidden size is no multiple of the heads")
    return head_dim


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, int]:
    """The sliding window and how many layers have it; None and 0 without one."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None, 0
    kinds = config.get("layer_types")
    count = num_layers if kinds is None else list(kinds).count("sliding_attention")
    return (window, count) if count else (None, 0)


def _given(config: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = _given(config, names)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise NotSizable(f"{names[0]}: a positive number is needed, not {value!r}")
    return value
