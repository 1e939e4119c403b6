"""The ways of starting vLLM in which leases can't be held, each with its cause and its remedy."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine.backends.vllm.arguments import NAME, lease_shares, role_problem
from engine.backends.vllm.backend import transfer_of
from engine.backends.vllm.beside import refusal
from engine.backends.vllm.internals import VllmChangedError, check_adapters
from engine.backends.vllm.names import is_known, vllm_version
from engine.settings import Settings, problems_of

OURS = f'{{"kv_connector":"{NAME}","kv_role":"kv_producer"}}'
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"


class Refused(RuntimeError):
    """This vLLM was started in a way in which leases can't be held. The message says why."""


def read_settings() -> Settings:
    """The settings of `ENGINE_*`. Those that choose or size a backend have no meaning here.

    Raises Refused. The message names each wrong setting.
    """
    try:
        return Settings(backend="vllm")  # type: ignore[call-arg]
    except ValidationError as error:
        raise Refused("holdfast: " + "; ".join(problems_of(error))) from None


def check(config: Any, settings: Settings, *, log_stats: bool) -> None:
    """Raise Refused for a VllmConfig in which leases can't be held.

    The message names everything that is wrong, and the flag to change. A vLLM whose names have
    changed is not refused. Our engine is off in it, as `parts_of` finds.
    """
    if not is_known("server"):
        return
    problems = [
        *_connector_problems(config, settings),
        *_server_problems(config),
        *_model_problems(config, settings),
    ]
    if not log_stats:
        problems.append("--disable-log-stats hides how long a request waits: leave it out")
    if os.environ.get(RUST_FRONT_END, "0") not in ("", "0"):
        problems.append(f"the Rust front end has no endpoint plugins: unset {RUST_FRONT_END}")
    if problems:
        raise Refused("holdfast: " + "; ".join(problems))


def our_connector(transfer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The part of a `kv_transfer_config` that is our connector's, alone or in a MultiConnector."""
    if transfer is None:
        return None
    children = _children(transfer)
    candidates = [transfer] if children is None else children
    matches = (connector for connector in candidates if connector.get("kv_connector") == NAME)
    return next(matches, None)


def our_shares(transfer: Mapping[str, Any] | None) -> dict[str, float]:
    """The shares of LEASE_SHARES by name, as our connector's settings have them.

    Raises ValueError for a wrong setting.
    """
    connector = our_connector(transfer) or {}
    return lease_shares(connector.get("kv_connector_extra_config") or {})


def _children(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The connectors in a MultiConnector; None for any other connector."""
    if transfer.get("kv_connector") != "MultiConnector":
        return None
    extra = transfer.get("kv_connector_extra_config") or {}
    return list(extra.get("connectors") or ())


def _connector_problems(config: Any, settings: Settings) -> list[str]:
    if getattr(config.cache_config, "kv_offloading_size", None):
        return ["--kv-offloading-size puts its own connector in the place of ours: leave it out"]
    transfer = transfer_of(config.kv_transfer_config)
    connector = our_connector(transfer)
    if connector is None:
        if transfer is not None and _children(transfer) is not None:
            return [
                f"the MultiConnector has no {NAME}: put {OURS} first into its `connectors`",
            ]
        return [f"vLLM has no {NAME}: add --kv-transfer-config '{OURS}'"]
    problems = list[str]()
    wrong_role = role_problem(connector.get("kv_role"))
    if wrong_role is not None:
        problems.append(wrong_role)
    try:
        our_shares(transfer)
    except ValueError as error:
        problems.append(f"kv_connector_extra_config: {error}")
    problem = refusal(transfer)
    if problem is not None and not settings.vllm_shares_kv_across_scopes:
        problems.append(problem)
    return problems


def _server_problems(config: Any) -> list[str]:
    problems = list[str]()
    parallel = config.parallel_config
    if getattr(parallel, "_api_process_count", 1) > 1:
        problems.append(
            "several API servers would each keep books of their own: set --api-server-count 1"
        )
    is_split = getattr(parallel, "data_parallel_external_lb", False)
    if parallel.data_parallel_size > 1 and not is_split:
        problems.append(
            "each data-parallel rank would be an engine of its own: start a server for each rank "
            "without --data-parallel-size, and name all of them in HOLDFAST_ENGINES"
        )
    if config.structured_outputs_config.backend != "guidance":
        problems.append("our grammars need --structured-outputs-config.backend guidance")
    return problems


def _model_problems(config: Any, settings: Settings) -> list[str]:
    model = config.model_config
    if getattr(model, "runner_type", "generate") == "pooling":
        return [
            "--runner pooling generates nothing, so there is nothing to lease: "
            "take holdfast out of VLLM_PLUGINS"
        ]
    problems = list[str]()
    cache = config.cache_config
    is_cpu = config.device_config.device_type == "cpu"
    if not cache.enable_prefix_caching:
        problems.append(
            "vLLM caches no prefixes of models with latent attention (MLA) on a CPU: take another "
            "model, or a GPU"
            if is_cpu and getattr(model, "use_mla", False)
            else "prefix caching is off: leave --no-enable-prefix-caching out"
        )
    elif not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        # Other hashes can be made to collide, and then one prompt would read another's blocks.
        problems.append("--prefix-caching-hash-algo must be sha256 or sha256_cbor")
    drafter = config.speculative_config
    if drafter is not None and drafter.use_eagle():
        problems.append("EAGLE and MTP drafters drop the last block of a hit: leave them out")
    if config.lora_config is not None:
        # The base model's rows may be wrong too, so it is not enough that we ask for no adapter.
        try:
            check_adapters(vllm_version(), is_cpu=is_cpu)
        except VllmChangedError as error:
            problems.append(str(error))
    elif settings.adapters:
        problems.append("ENGINE_ADAPTERS needs --enable-lora")
    return problems
