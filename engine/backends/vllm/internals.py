"""What we use of vLLM's inside, as types and as a list that is checked at every start.

Written against vLLM 0.32, tried with 0.30 and 0.31, and read against 0.33, in which all of it
stands unchanged (there the
scheduler calls `update_state_after_alloc` later for asynchronous loads, of which we have none).
This module imports nothing of vLLM when it is loaded.
"""

import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class Block(Protocol):
    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> bytes | None: ...


class BlockPool(Protocol):
    num_gpu_blocks: int
    hash_block_size: int
    blocks: Sequence[Block]
    cached_block_hash_to_block: Collection[object]
    _maybe_evict_cached_block: Callable[[Block], bool]

    def touch(self, blocks: Sequence[Block]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None: ...
    def unpin_blocks(self, blocks: Iterable[Block], on_reuse: Callable[[Block], None]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class Coordinator(Protocol):
    scheduler_block_size: int
    single_type_managers: Sequence[Any]

    def find_longest_cache_hit(
        self, block_hashes: list[bytes], max_cache_hit_length: int
    ) -> tuple[Sequence[Sequence[Block]], int, int]: ...


class CacheManager(Protocol):
    block_pool: BlockPool
    coordinator: Coordinator
    enable_caching: bool
    use_eagle: bool
    allocate_slots: Callable[..., Any]
    reset_prefix_cache: Callable[[], bool]


class Request(Protocol):
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None

    @property
    def num_output_tokens(self) -> int: ...


# Tested with 0.32, tried with 0.30 and 0.31, read against 0.33.
MIN_VERSION, BELOW_VERSION = (0, 30), (0, 34)


class VllmChangedError(RuntimeError):
    """Something that we use of vLLM is not as we know it; the message names it."""


class Used(NamedTuple):
    """A callable that we call or override, and the parameters that we rely on, in order."""

    path: str
    parameters: tuple[str, ...]


_CORE = "vllm.v1.core."
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1."
CALLABLES = (
    Used(_CORE + "block_pool:BlockPool.touch", ("self", "blocks")),
    Used(_CORE + "block_pool:BlockPool.free_blocks", ("self", "ordered_blocks")),
    Used(_CORE + "block_pool:BlockPool.unpin_blocks", ("self", "blocks", "on_reuse")),
    Used(_CORE + "block_pool:BlockPool.get_num_free_blocks", ("self",)),
    Used(_CORE + "block_pool:BlockPool._maybe_evict_cached_block", ("self", "block")),
    *(
        Used(
            f"{_CORE}kv_cache_coordinator:{kind}KVCacheCoordinator.find_longest_cache_hit",
            ("self", "block_hashes", "max_cache_hit_length"),
        )
        for kind in ("Unitary", "Hybrid")
    ),
    *(
        Used(
            f"{_CORE}single_type_kv_cache_manager:{manager}.cache_blocks",
            ("self", "request", "num_tokens", "retention_interval", "replay_boundaries"),
        )
        for manager in ("FullAttentionManager", "SlidingWindowManager")
    ),
    Used(
        _CORE + "kv_cache_manager:KVCacheManager.allocate_slots",
        ("self", "request", "num_new_tokens", "new_computed_blocks", "has_scheduled_reqs"),
    ),
    Used(_CORE + "kv_cache_manager:KVCacheManager.reset_prefix_cache", ("self",)),
    Used(_CORE + "sched.scheduler:Scheduler.get_kv_connector", ("self",)),
    Used(_BASE + "__init__", ("self", "vllm_config", "role", "kv_cache_config")),
    Used(_BASE + "bind_kv_cache_manager", ("self", "kv_cache_manager")),
    Used(_BASE + "on_new_request", ("self", "request")),
    Used(_BASE + "get_num_new_matched_tokens", ("self", "request", "num_computed_tokens")),
    Used(_BASE + "update_state_after_alloc", ("self", "request", "blocks", "num_external_tokens")),
    Used(_BASE + "build_connector_meta", ("self", "scheduler_output")),
    Used(_BASE + "request_finished", ("self", "request", "block_ids")),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.request_finished_all_groups",
        ("self", "request", "block_ids"),
    ),
    Used(_BASE + "get_kv_connector_stats", ("self",)),
    Used(_BASE + "reset_cache", ("self",)),
    Used(_BASE + "build_kv_connector_stats", ("data",)),
    Used(
        _BASE + "build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:"
        "MultiConnector.sub_connectors",
        ("self",),
    ),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector",
        ("name", "module_path", "class_name"),
    ),
    Used(
        "vllm.distributed.kv_transfer.kv_connector.factory:"
        "KVConnectorFactory.get_connector_class_by_name",
        ("connector_name",),
    ),
    Used("vllm.v1.engine.core_client:AsyncMPClient.call_utility_async", ("self", "method")),
    Used("vllm.v1.engine.core:EngineCore.__init__", ("self", "vllm_config")),
)
SCHEDULER_ATTRIBUTES = ("running", "waiting", "kv_cache_manager")
_MANAGER_ATTRIBUTES = ("block_pool", "coordinator", "enable_caching", "use_eagle")
_COORDINATOR_ATTRIBUTES = ("scheduler_block_size", "single_type_managers")
_BLOCKS_ATTRIBUTES = ("req_to_blocks",)
_POOL_ATTRIBUTES = ("num_gpu_blocks", "hash_block_size", "blocks", "cached_block_hash_to_block")
_BLOCK_ATTRIBUTES = ("block_id", "ref_cnt", "is_null", "block_hash")
REQUEST_ATTRIBUTES = (
    "request_id",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_output_tokens",
    "block_hashes",
    "kv_transfer_params",
)


def check_version(version: str) -> None:
    """Raise VllmChangedError for a vLLM that nobody has read our assumptions against."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not MIN_VERSION <= numbers < BELOW_VERSION:
        raise VllmChangedError(f"vLLM {version} is not known: needs >= 0.30, < 0.34")


def check_callables(used: Sequence[Used] = CALLABLES) -> None:
    """Raise VllmChangedError where a callable is missing or a parameter that we rely on is."""
    for path, parameters in used:
        module, _, names = path.partition(":")
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = inspect.getattr_static(found, name, None)
        if isinstance(found, property):
            found = found.fget
        if isinstance(found, classmethod | staticmethod):
            found = found.__func__
        if found is None:
            raise VllmChangedError(f"vLLM has no {path} any more")
        has = [name for name in inspect.signature(found).parameters if name != "cls"]
        if [name for name in has if name in parameters] != list(parameters):
            raise VllmChangedError(f"vLLM's {path} takes {has}, we rely on {list(parameters)}")


def check_objects(cache: Any) -> None:
    """Raise VllmChangedError where the cache manager or what it holds lacks what we use."""
    _check_attributes(cache, _MANAGER_ATTRIBUTES)
    _check_attributes(cache.coordinator, _COORDINATOR_ATTRIBUTES)
    for manager in cache.coordinator.single_type_managers:
        _check_attributes(manager, _BLOCKS_ATTRIBUTES)
    _check_attributes(cache.block_pool, _POOL_ATTRIBUTES)
    _check_attributes(cache.block_pool.blocks[0], _BLOCK_ATTRIBUTES)


def check_scheduler(scheduler: Any) -> None:
    """Raise VllmChangedError where the scheduler lacks what `CORE_STATS` counts."""
    _check_attributes(scheduler, SCHEDULER_ATTRIBUTES)


def check_request(request: Any) -> None:
    """Raise VllmChangedError where a request lacks what we use."""
    _check_attributes(request, REQUEST_ATTRIBUTES)


def _check_attributes(owner: Any, names: Sequence[str]) -> None:
    for name in names:
        if not hasattr(owner, name):
            raise VllmChangedError(f"vLLM's {type(owner).__name__} has no {name} any more")
