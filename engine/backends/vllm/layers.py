"""What a model's layers keep of a token, as far as we can hold it, and how many bytes that is."""

from collections.abc import Iterable, Mapping
from typing import Any

from engine.sizing import DTYPE_BYTES, NotSizable, kv_size

HELD = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec"})
"""vLLM's kinds of KV cache whose blocks a later hit takes as they are, by class."""
_CACHE_BYTES = {**DTYPE_BYTES, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}


def check_layers(groups: Iterable[Any]) -> None:
    """Raises ValueError for layers whose cache is no keys and values at every token.

    A state (Mamba, GDN) is kept at few places. A hit could only end there, and no chunk is made to.
    """
    for group in groups:
        spec = group.kv_cache_spec
        # One group may stand for layers of one kind and several shapes.
        specs = getattr(spec, "kv_cache_specs", None)
        for one in [spec] if specs is None else specs.values():
            kind = type(one).__name__
            if kind not in HELD:
                raise ValueError(
                    f"HoldfastConnector can't hold layers of the kind {kind} "
                    f"({', '.join(group.layer_names[:2])}, …): they keep no block for each token"
                )


def kv_bytes(config: Mapping[str, Any], model_dtype: str, cache_dtype: str) -> int:
    """Bytes of one token's keys and values; 0 where nobody here knows.

    `config` is the model's config.json. `cache_dtype` is vLLM's `kv_cache_dtype`: `auto` means the
    model's. With latent attention (MLA) a layer keeps one latent vector and one rotary key.
    """
    number = _CACHE_BYTES.get(model_dtype if cache_dtype == "auto" else cache_dtype)
    if number is None or model_dtype not in DTYPE_BYTES:
        return 0
    nested = config.get("text_config")
    inner = nested if isinstance(nested, Mapping) else config
    if rank := inner.get("kv_lora_rank"):
        layers, rope = inner.get("num_hidden_layers"), inner.get("qk_rope_head_dim")
        if not all(isinstance(value, int) for value in (rank, layers, rope)):
            return 0
        return int(layers * (rank + rope) * number)
    try:
        size = kv_size(config, model_dtype)
    except NotSizable:
        return 0
    return size.bytes_per_token // size.head_bytes * size.head_dim * number
