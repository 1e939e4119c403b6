"""Our settings as vLLM's engine arguments, and the settings of our connector."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from engine.refusal import StartRefused
from engine.settings import Settings

NAME = "HoldfastConnector"
"""The connector's name in vLLM's settings."""
# It begins with this package's own name, which is another one inside the plugin's distribution.
MODULE = f"{__name__.rpartition('.')[0]}.connector"
LEASE_SHARES = {"lease_share": 0.25, "scope_lease_share": 0.5}
"""What leases may hold in a vLLM that others use too, unless its operator says otherwise.

`lease_share` is the part of the pool's blocks that all leases may hold, 0 to 1. `scope_lease_share`
is the part of those blocks that one scope may claim from scopes that hold more.
"""

OURS = ("model", "disable_log_stats", "enable_prefix_caching", "data_parallel_size")
"""The arguments that ENGINE_VLLM_ARGS can't set.

ENGINE_MODEL names the model. The engine works with only one value of each of the others. Each
data-parallel rank has its own scheduler and its own blocks, so it would be an engine of its own.
"""


class ArgumentRefused(StartRefused):
    """The message names the argument of ENGINE_VLLM_ARGS."""


def engine_arguments(settings: Settings, *, is_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. Raises ArgumentRefused.

    A value of ENGINE_VLLM_ARGS replaces a default. A setting of ours replaces both if it was given.
    vLLM's pool has one block more than ours: its null block. A `kv_transfer_config` of
    ENGINE_VLLM_ARGS names the connectors beside ours.
    """
    for name in settings.vllm_args:
        if name in OURS:
            raise ArgumentRefused(f"ENGINE_VLLM_ARGS: `{name}` is set by the engine")
    num_blocks = None if settings.num_blocks is None else settings.num_blocks + 1
    # vLLM's name of an argument, our name of the setting, and its value.
    values = (
        ("dtype", "dtype", settings.dtype),
        ("block_size", "block_size", settings.block_size),
        ("num_gpu_blocks_override", "num_blocks", num_blocks),
        ("max_num_batched_tokens", "max_step_tokens", settings.max_step_tokens),
        ("max_num_seqs", "max_running", settings.max_running),
    )
    our_values: dict[str, Any] = {
        name: value
        for name, setting, value in values
        if setting in settings.model_fields_set and value is not None
    }
    defaults: dict[str, Any] = {
        # SHA-256 over CBOR is the same in every process and language.
        "prefix_caching_hash_algo": "sha256_cbor",
        # Our grammars are in llguidance's language. vLLM calls that backend `guidance`.
        "structured_outputs_config": {"backend": "guidance"},
    }
    if settings.adapters:
        defaults |= {"max_loras": 4}
    if is_cpu:
        defaults |= {"block_size": 32, "enforce_eager": True, "dtype": "float32"}
    return {
        **defaults,
        **settings.vllm_args,
        **our_values,
        "model": settings.model,
        "enable_prefix_caching": True,
        **({"enable_lora": True} if settings.adapters else {}),
        "disable_log_stats": False,
        "kv_transfer_config": _transfer_config(settings),
    }


def _transfer_config(settings: Settings) -> dict[str, Any]:
    """Our connector alone, or in a MultiConnector in front of the connectors that were given."""
    our_connector: dict[str, Any] = {
        "kv_connector": NAME,
        "kv_role": "kv_producer",
        "kv_connector_module_path": MODULE,
        "kv_connector_extra_config": {
            "lease_share": settings.lease_share,
            "scope_lease_share": LEASE_SHARES["scope_lease_share"],
        },
    }
    transfer = settings.vllm_args.get("kv_transfer_config")
    if transfer is None:
        return our_connector
    connectors: Any = [transfer]
    if isinstance(transfer, Mapping) and transfer.get("kv_connector") == "MultiConnector":
        extra = transfer.get("kv_connector_extra_config")
        connectors = extra.get("connectors") if isinstance(extra, Mapping) else None
    if not isinstance(connectors, list) or not all(
        isinstance(connector, Mapping) and connector.get("kv_connector") for connector in connectors
    ):
        message = "ENGINE_VLLM_ARGS: `kv_transfer_config` must name a `kv_connector`"
        raise ArgumentRefused(message)
    foreign_connectors = [
        connector for connector in connectors if connector["kv_connector"] != NAME
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [our_connector, *foreign_connectors]},
    }


def role_problem(role: object) -> str | None:
    """Why our connector can't have this `kv_role`. None if it can."""
    if role != "kv_consumer":
        return None
    return (
        f"the `kv_role` of {NAME} must be kv_producer: it consumes nothing, and for a consumer "
        "vLLM gives blocks back later"
    )


def lease_shares(extra: Mapping[str, Any]) -> dict[str, float]:
    """The shares of LEASE_SHARES by name, as a `kv_connector_extra_config` sets them.

    Raises ValueError for a name that is no setting of ours, and for a value that is not from 0
    to 1.
    """
    for name in extra:
        if name not in LEASE_SHARES:
            matches = get_close_matches(name, LEASE_SHARES, 1)
            hint = (
                f"did you mean `{matches[0]}`?"
                if matches
                else f"its settings are {', '.join(LEASE_SHARES)}"
            )
            raise ValueError(f"`{name}` is no setting of {NAME}: {hint}")
    shares = dict[str, float]()
    for name, default in LEASE_SHARES.items():
        try:
            share = float(extra.get(name, default))
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number between 0 and 1") from None
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must be between 0 and 1")
        shares[name] = share
    return shares
