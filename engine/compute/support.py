"""Which models can be served exactly, decided from their configuration.

The check at load finds the rest (`engine.compute.loading.check_exactness`).
"""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from engine.compute.errors import ModelRefused
from engine.compute.kv import KvLayout

# These rotary frequencies depend on the longest sequence in the forward. A cached key would be
# right for one length only, and sequences in a batch would influence each other.
_LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope"})
# Configuration attribute -> what it means when it is set to anything true.
_UNSUPPORTED_ATTRIBUTES = {
    "kv_lora_rank": "multi-head latent attention",
    "alibi": "ALiBi position bias",
    "relative_attention_num_buckets": "relative position bias",
    "num_kv_shared_layers": "layers that share keys and values",
    "use_bidirectional_attention": "bidirectional attention",
    "is_encoder_decoder": "an encoder",
    "attention_chunk_size": "chunked attention",
    "ssm_state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "state_size": "state-space layers",
    "linear_num_key_heads": "linear attention",
}
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_config(config: PretrainedConfig) -> None:
    """Raise ModelRefused, with the reason, if paged attention can't be exact for this model."""
    name = getattr(config, "model_type", "unknown")
    for attribute, meaning in _UNSUPPORTED_ATTRIBUTES.items():
        if getattr(config, attribute, None):
            raise ModelRefused(f"`{name}` models have {meaning}: not supported")
    if config.get_text_config(decoder=True) is not config:
        raise ModelRefused(f"`{name}` models are more than a text decoder: not supported")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= _LAYER_TYPES:
        unknown = sorted(layer_types - _LAYER_TYPES)
        raise ModelRefused(f"`{name}` models have layers of other kinds: {unknown}")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type in _LENGTH_DEPENDENT_ROPES:
            raise ModelRefused(f"rotary embedding that depends on the length: {rope_type}")


def check_class(model_class: type[PreTrainedModel]) -> None:
    """Raise ModelRefused for a model class whose attention can't be replaced."""
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelRefused(f"{model_class.__name__} does not support attention backends")


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Each layer's sliding window in tokens; None for a layer that sees everything."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def kv_layout(config: PretrainedConfig, dtype: torch.dtype) -> KvLayout:
    """The KV shape by the configuration. The first forward checks it."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return KvLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        dtype=dtype,
    )


def _rope_types(parameters: Any) -> set[str]:
    """The kinds of rotary embedding, from one set of parameters or from one per layer type."""
    if not isinstance(parameters, dict):
        return set()
    kinds = {parameters.get("rope_type")}
    kinds |= {inner.get("rope_type") for inner in parameters.values() if isinstance(inner, dict)}
    return {kind for kind in kinds if isinstance(kind, str)}
