"""The names inside vLLM that we rely on, and a check at the start that they have not changed.

vLLM promises none of them. `signatures.py` has how each looked in the versions that were read. It
is generated (`scripts/setup/vllm_names.py`). The check decides, and not the version: a later vLLM
is taken if no name has changed. If one has changed, the message has that name.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from typing import Any

from engine.backends.vllm.internals import VllmChangedError, check_version
from engine.backends.vllm.signatures import SIGNATURES

_CORE = "vllm.v1.core"
_KV = "vllm.distributed.kv_transfer.kv_connector"
_OFFLOAD = "vllm.v1.kv_offload"

NAMES: dict[str, dict[str, str]] = {
    # The scheduler's process: what the connector uses and wraps, and what calls it.
    "scheduler": {
        f"{_CORE}.block_pool:BlockPool": "touch free_blocks unpin_blocks get_num_free_blocks "
        "_maybe_evict_cached_block num_gpu_blocks hash_block_size blocks",
        f"{_CORE}.kv_cache_utils:KVCacheBlock": "block_id ref_cnt is_null block_hash",
        f"{_CORE}.kv_cache_manager:KVCacheManager": "allocate_slots reset_prefix_cache block_pool "
        "coordinator enable_caching use_eagle",
        f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator": "find_longest_cache_hit "
        "single_type_managers scheduler_block_size",
        f"{_CORE}.single_type_kv_cache_manager:SingleTypeKVCacheManager": "cache_blocks "
        "kv_cache_spec block_size req_to_blocks",
        f"{_CORE}.sched.scheduler:Scheduler": "_mamba_block_aligned_split get_kv_connector running "
        "waiting kv_cache_manager",
        f"{_CORE}.sched.output:SchedulerOutput": "num_scheduled_tokens",
        "vllm.v1.request:Request": "request_id num_prompt_tokens num_computed_tokens "
        "num_preemptions block_hashes kv_transfer_params num_output_tokens",
        f"{_KV}.factory:KVConnectorFactory": "register_connector get_connector_class_by_name",
        f"{_KV}.v1.multi_connector:MultiConnector": "sub_connectors",
        f"{_KV}.v1.base:SupportsHMA": "request_finished_all_groups",
        f"{_KV}.v1.base:KVConnectorBase_V1": "__init__ bind_kv_cache_manager on_new_request "
        "get_num_new_matched_tokens update_state_after_alloc build_connector_meta request_finished "
        "reset_cache requires_kv_delivery start_load_kv wait_for_layer_load save_kv_layer "
        "wait_for_save _kv_transfer_config",
    },
    # Our server's process.
    "server": {
        "vllm.v1.engine.async_llm:AsyncLLM": "add_request abort add_lora remove_lora shutdown "
        "errored from_vllm_config engine_core renderer model_config vllm_config",
        "vllm.v1.engine.core_client:AsyncMPClient": "call_utility_async",
        "vllm.v1.engine.output_processor:RequestOutputCollector": "get",
        "vllm.outputs:RequestOutput": "outputs finished metrics",
        "vllm.outputs:CompletionOutput": "token_ids finish_reason",
        "vllm.v1.metrics.stats:RequestStateStats": "scheduled_ts queued_ts",
        "vllm.renderers.base:BaseRenderer": "render_cmpl_async",
        "vllm.multimodal.media.image:ImageMediaIO": "__init__ load_bytes",
        "vllm.lora.request:LoRARequest": "lora_int_id",
        "vllm.engine.arg_utils:AsyncEngineArgs": "create_engine_config disable_log_stats",
        "vllm.config:VllmConfig": "cache_config device_config kv_transfer_config load_config "
        "lora_config model_config parallel_config speculative_config structured_outputs_config",
        "vllm.config:CacheConfig": "enable_prefix_caching kv_offloading_size mamba_cache_mode "
        "prefix_caching_hash_algo",
        "vllm.config:ParallelConfig": "_api_process_count data_parallel_external_lb "
        "data_parallel_size",
        "vllm.config:ModelConfig": "max_model_len revision runner_type tokenizer "
        "tokenizer_revision try_get_generation_config use_mla",
        "vllm.config:SpeculativeConfig": "use_eagle",
    },
    # What our cache policy and our tier use, and what calls them.
    "offloading": {
        f"{_KV}.v1.offloading_connector:OffloadingConnector": "connector_scheduler",
        f"{_KV}.v1.offloading.scheduler:OffloadingConnectorScheduler": "manager",
        f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager": "primary_tier secondary_tiers",
        f"{_OFFLOAD}.cpu.manager:CPUOffloadingManager": "_policy",
        f"{_OFFLOAD}.cpu.policies.base:CachePolicy": "__init__ get insert remove touch evict clear "
        "mark_evictable mark_non_evictable on_store_miss on_request_finished",
        f"{_OFFLOAD}.cpu.policies.base:ChunkStatus": "ref_cnt",
        f"{_OFFLOAD}.base:OffloadingSpec": "blocks_per_chunk config",
        f"{_OFFLOAD}.base:ReqContext": "kv_transfer_params",
        f"{_OFFLOAD}.tiering.base:TransferJob": "job_id keys chunk_ids",
        f"{_OFFLOAD}.tiering.base:SecondaryTierManager": "__init__ on_new_request lookup "
        "submit_store submit_load get_finished_jobs has_pending_work drain_jobs shutdown "
        "_block_size_bytes",
        f"{_OFFLOAD}.tiering.base:JobResult": "__init__",
    },
}
"""For each part of ours the names that it relies on, by their class: `MODULE:CLASS`."""


def vllm_version() -> str:
    """The version of the vLLM that this process imports."""
    version: str = importlib.import_module("vllm").__version__
    return version


def check_names(part: str) -> None:
    """Raise VllmChangedError for a vLLM that is too old, or whose names have changed.

    `part` is a key of NAMES. The message has each of its names that has changed.
    """
    version = vllm_version()
    check_version(version)
    changed = [
        f"{name} ({'gone' if signature is None else f'now {signature}'})"
        for name, signature in signatures_of(part).items()
        if signature is None or signature not in SIGNATURES.get(name, {}).values()
    ]
    if changed:
        raise VllmChangedError(f"vLLM {version} is not known: it has changed {', '.join(changed)}")


def is_known(part: str) -> bool:
    """Whether `check_names` passes."""
    try:
        check_names(part)
    except VllmChangedError:
        return False
    return True


def signatures_of(part: str) -> dict[str, str | None]:
    """How each name of a part looks in this vLLM. None for a name that is not there."""
    signatures = dict[str, str | None]()
    for owner, names in NAMES[part].items():
        path, _, kind = owner.partition(":")
        try:
            owner_class = getattr(importlib.import_module(path), kind, None)
        except ImportError:
            owner_class = None
        for name in names.split():
            key = f"{owner.removeprefix('vllm.')}.{name}"
            signatures[key] = None if owner_class is None else signature_of(owner_class, name)
    return signatures


def signature_of(owner: type, name: str) -> str | None:
    """A function's parameters by name and kind, with `=` behind those that may be left out.

    `attribute` for anything else. None for a name that is not there.
    """
    value = inspect.getattr_static(owner, name, None)
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if inspect.isfunction(value):
        return _parameters(value)
    return "attribute" if value is not None or name in _attributes(owner) else None


# Stands for any default: signatures tell that there is one, and not its value.
_ANY_DEFAULT = None


def _parameters(function: Any) -> str:
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.empty if parameter.default is parameter.empty else _ANY_DEFAULT,
        )
        for parameter in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("=None", "=")


@functools.cache
def _attributes(owner: type) -> set[str]:
    """The attributes that a class and its bases declare, or set on `self`."""
    names = set[str]()
    for kind in owner.__mro__[:-1]:
        names.update(getattr(kind, "__slots__", ()), inspect.get_annotations(kind))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError):
            continue
        names.update(
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        )
    return names
