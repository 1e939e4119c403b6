"""The memory of a plan's model: keys and values by `engine.sizing`, weights by its shape."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.sizing import GIB, KvSize, NotSizable, kv_size
from gateway.base.errors import InvalidRequest
from gateway.planning.traffic import FAMILIES, PlanRequest

_KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
_WEIGHT_BYTES = 2
_LARGEST = 100_000_000
_SPARED = 0.1
"""Of a device, for activations and buffers, as engines set it aside."""
__all__ = ["GIB", "Sizes", "sizes_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """`kv_bytes` of one engine's device are for keys and values. `active_parameters` compute a
    token; None where the config does not say enough, and nothing needs it."""

    shape: KvSize
    bytes_per_token: int
    weights_gib: float
    spared_gib: float
    kv_bytes: int
    is_weights_given: bool
    active_parameters: float | None


def sizes_of(asked: PlanRequest) -> Sizes:
    """Raise InvalidRequest with the field that is wrong or missing."""
    config: Mapping[str, Any] | None = asked.config
    parameters = active = None
    where = "config"
    if config is None:
        config, where = tomllib.loads(FAMILIES.read_text("utf-8")).get(asked.model), "model"
        if config is None:
            raise InvalidRequest(
                f"model: no family {asked.model!r} is known; paste its config.json as `config`"
            )
        parameters = config["parameters"] * 1e9
        active = config.get("active", config["parameters"]) * 1e9
    elif asked.target is not None or asked.weights_gib is None:
        parameters, active = _parameters(config), _parameters(config, of_one_token=True)
    try:
        shape = kv_size(config, "bfloat16")
    except NotSizable as error:
        raise InvalidRequest(f"{where}: {error}") from None
    if shape.state_bytes:
        raise InvalidRequest(
            f"{where}: the model's linear layers keep a state of {shape.state_bytes:,} bytes at"
            " each breakpoint, and plans know keys and values alone"
        )
    per_token = shape.bytes_per_token * _KV_BYTES[asked.kv_dtype] // 2
    weights = asked.weights_gib
    if weights is None:
        assert parameters is not None
        weights = parameters * _WEIGHT_BYTES / GIB
        spared = _SPARED * asked.device_gib
    else:
        spared = 0.0
    left = asked.device_gib - weights - spared
    if left * GIB < 64 * 16 * per_token:
        raise InvalidRequest(
            f"device_gib: {asked.device_gib:g} GiB leave {max(left, 0):.1f} GiB for keys and values"
            f" beside {weights:.1f} GiB of weights and {spared:.1f} GiB of buffers; at least 64"
            " blocks are needed"
        )
    return Sizes(
        shape=shape,
        bytes_per_token=per_token,
        weights_gib=weights,
        spared_gib=spared,
        kv_bytes=int(left * GIB),
        is_weights_given=asked.weights_gib is not None,
        active_parameters=active,
    )


def _parameters(config: Mapping[str, Any], *, of_one_token: bool = False) -> float:
    """About the number of weights of a decoder with gated MLPs and grouped heads: all of them, or
    those that compute one token."""
    nested = config.get("text_config")
    config = nested if isinstance(nested, Mapping) else config
    hidden = _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    kv_heads = _whole(config, "num_key_value_heads", heads)
    head = _whole(config, "head_dim", max(hidden // heads, 1))
    inner = _whole(config, "intermediate_size", 4 * hidden)
    experts = _whole(config, "num_experts", _whole(config, "num_local_experts", 1))
    if experts > 1:
        inner = _whole(config, "moe_intermediate_size", inner)
        if of_one_token:
            experts = _whole(config, "num_experts_per_tok", experts)
    layer = 2 * hidden * head * (heads + kv_heads) + 3 * hidden * inner * experts
    tables = 1 if config.get("tie_word_embeddings") else 2
    embeddings = _whole(config, "vocab_size") * hidden * tables
    return float(_whole(config, "num_hidden_layers") * layer + embeddings)


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
        raise InvalidRequest(
            f"config: {name}: a number from 1 to {_LARGEST:,} is needed for the size of the"
            " weights; or give weights_gib"
        )
    return value
