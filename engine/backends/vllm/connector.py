"""A KV connector for vLLM that moves no data: it holds leases on vLLM's own blocks.

    --kv-transfer-config '{"kv_connector": "HoldfastConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "engine.backends.vllm.connector",
        "kv_connector_extra_config": {"lease_share": 0.25, "scope_lease_share": 0.5}}'

The role must be `kv_producer`: a consumer's makes vLLM defer the return of every block. Like any
connector it excludes encoder-decoder models and `expandable_segments:True` of PyTorch's allocator.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine.backends.vllm import directive
from engine.backends.vllm.arguments import lease_shares
from engine.backends.vllm.internals import Block, CacheManager, check_layers, check_version
from engine.backends.vllm.leases import Below, LeaseManager, RequestTracker
from engine.backends.vllm.metrics import HoldfastStats, NoMetrics
from engine.backends.vllm.plugin import register
from engine.backends.vllm.switch import Switch, guarded
from engine.store.journal import Record

logger = init_logger(f"vllm.{__name__}")


class HoldfastMetadata(KVConnectorMetadata):
    """Nothing: workers have no part in it."""


NO_METADATA = HoldfastMetadata()


class HoldfastConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one in the scheduler's process, which does it all, and one in each worker.

    Raises ValueError at start for a setting that can't be, prefix caching off, layers of a kind
    that is not known, or a drafter that drops the last block of hits (EAGLE, MTP); VllmChangedError
    for a version that is not known.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._told: int | None = None
        self.switch = Switch()
        self.leases: LeaseManager | None = None
        self.tracker: RequestTracker | None = None
        register()  # MultiConnector looks us up by name, with or without the entry point
        if role == KVConnectorRole.SCHEDULER:
            if kv_cache_config is not None:
                check_layers(kv_cache_config.kv_cache_groups)
            check_version(vllm.__version__)
            add_utilities()
            cut_at_marks()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The workers' side: there is nothing to do.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        return

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if not kv_cache_manager.enable_caching:
            raise ValueError("HoldfastConnector needs prefix caching (enable_prefix_caching)")
        if kv_cache_manager.use_eagle:
            raise ValueError("HoldfastConnector can't hold what EAGLE or MTP drafters look up")
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.leases = leases = LeaseManager(
            kv_cache_manager, on_reuse=self._note_reuse, **lease_shares(extra)
        )
        self.tracker = tracker = RequestTracker(leases)
        self.switch.give_back = leases.abandon
        wrap_cache(kv_cache_manager, leases, tracker, self.switch)

    @guarded(None)
    def on_new_request(self, request: Any) -> None:
        problem = self._of_scheduler().arrive(request)
        if problem is not None:
            logger.warning_once("A directive was ignored: %s", problem)

    @guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False  # what is found here is noted when the request gets its blocks

    @guarded(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler().admit(request.request_id)

    @guarded(NO_METADATA)
    def build_connector_meta(self, scheduler_output: Any) -> HoldfastMetadata:
        self._of_scheduler().schedule(scheduler_output.num_scheduled_tokens)
        return NO_METADATA

    @guarded((False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self._of_scheduler().end(request.request_id)
        return False, None

    @guarded((False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        """There is no store of ours behind vLLM's cache; its own reset has ended the leases."""
        return True

    # Metrics.

    @guarded(None)
    def get_kv_connector_stats(self) -> HoldfastStats | None:
        """What changed since the last step; None if nothing did, and in workers."""
        if self.tracker is None or self.tracker.num_running == self._told:
            return None
        self._told = self.tracker.num_running
        return HoldfastStats(data={"tracked_running": self._told})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HoldfastStats:
        return HoldfastStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> NoMetrics:
        register()
        return NoMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Inside.

    def _of_scheduler(self) -> RequestTracker:
        assert self.tracker is not None, "vLLM calls this in its scheduler only"
        return self.tracker

    @guarded(None)
    def _note_reuse(self, block: Any) -> None:
        assert self.leases is not None
        self.leases.note_reuse(block)


# The server's calls (`directive.py`), as methods of vLLM's EngineCore: added, nothing is replaced.
# They run between two steps in the scheduler's thread, and while it is idle. vLLM has no other way
# for a connector to be asked (its RFC 51639 proposes one). vLLM passes what a call raises on to its
# caller. All but `SWITCH_OFF` raise SwitchedOff once the connector is off.


class Held(NamedTuple):
    """Our parts in one vLLM's scheduler."""

    leases: LeaseManager
    tracker: RequestTracker
    switch: Switch


_records = msgspec.json.Decoder(list[Record])


def add_utilities() -> None:
    """Add the calls, once or again."""
    to_builtins = msgspec.to_builtins
    calls: dict[str, Callable[..., Any]] = {
        directive.BIND: _bind,
        directive.SWITCH_OFF: lambda core, reason: find_connector(core).switch.turn_off(reason),
        directive.REPORT: lambda core, of: to_builtins(_running(core).tracker.report(of)),
        directive.RELEASE: lambda core, keys: _running(core).leases.release(keys),
        directive.UNLEASE: lambda core, keys: _running(core).leases.unlease(keys),
        directive.RECORD: lambda core, told: _running(core).leases.record(_records.decode(told)),
        directive.LOSSES: lambda core: to_builtins(_running(core).leases.take_losses()),
        directive.CORE_STATS: _core_stats,
    }
    for name, call in calls.items():
        setattr(EngineCore, name, call)


def find_connector(core: Any) -> Held:
    """Ours, alone or among a MultiConnector's; raises RuntimeError if there is none."""
    found = _of(core.scheduler)
    if found is None:
        raise RuntimeError("this vLLM runs without HoldfastConnector")
    assert found.leases is not None and found.tracker is not None
    return Held(found.leases, found.tracker, found.switch)


def _of(scheduler: Any) -> HoldfastConnector | None:
    connector = scheduler.get_kv_connector()
    candidates = (connector, *getattr(connector, "sub_connectors", ()))
    return next((one for one in candidates if isinstance(one, HoldfastConnector)), None)


def cut_at_marks() -> None:
    """Have vLLM's schedulers end a hybrid's chunk at a marked offset: a state is kept there.

    Its own ends are blocks' boundaries, the last of the prompt, and where an earlier prompt parted.
    """
    split = Scheduler._mamba_block_aligned_split
    if hasattr(split, "__wrapped__"):
        return

    @functools.wraps(split)
    def split_at_marks(
        self: Scheduler, request: Any, num_new_tokens: int, local: int = 0, external: int = 0
    ) -> int:
        num: int = split(self, request, num_new_tokens, local, external)
        found = _of(self)
        if found is None or found.tracker is None:
            return num
        tracker, start = found.tracker, request.num_computed_tokens + local + external
        return found.switch.run(lambda: tracker.cut(request.request_id, start, num), num)

    setattr(Scheduler, split.__name__, split_at_marks)


def _bind(core: Any, token: str) -> Any:
    leases, tracker, _ = _running(core)
    leases.below = _find_below(core.scheduler)
    tracker.bind(token)
    below, bound = leases.below, directive.Bound()
    if below is not None:
        entries = leases.restore()
        bound = directive.Bound(max_blocks=below.max_blocks, chain=below.chain, entries=entries)
    return msgspec.to_builtins(bound)


def _find_below(scheduler: Any) -> Below | None:
    """A tier of ours in an OffloadingConnector beside us (`tiers.py`)."""
    for connector in getattr(scheduler.get_kv_connector(), "sub_connectors", ()):
        manager: Any = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
        for tier in getattr(manager, "secondary_tiers", ()):
            if isinstance(tier, Below):
                tier.above = manager.primary_tier._policy
                return tier
    return None


def _running(core: Any) -> Held:
    found = find_connector(core)
    found.switch.check()
    return found


def _core_stats(core: Any) -> Any:
    leases, tracker, _ = _running(core)
    scheduler = core.scheduler
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    ours = {
        block.block_id
        for manager in managers
        for request_id in tracker.request_ids
        for block in manager.req_to_blocks.get(request_id, ())
    }
    stats = directive.CoreStats(
        **leases.block_states(ours),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        foreign_running=sum(
            request.request_id not in tracker.request_ids for request in scheduler.running
        ),
        leased_blocks=leases.num_leased_blocks,
        max_leased_blocks=leases.max_leased_blocks,
        evicted_blocks=leases.evicted_blocks,
        leases_lowered=leases.num_lowered,
        store=None if leases.below is None else leases.below.stats(),
    )
    return msgspec.to_builtins(stats)


def wrap_cache(
    cache: CacheManager, leases: LeaseManager, tracker: RequestTracker, switch: Switch
) -> None:
    """Wrap what vLLM calls of its cache.

    A stall with nothing running is prevented: waiting requests give up blocks, then leases end.
    While a request runs, vLLM decides: a request that does not fit waits, or a running one is
    preempted. The last running request preempts itself if it does not fit, and comes back as a
    waiting one.
    """
    allocate = cache.allocate_slots
    parameters = inspect.signature(allocate)
    empty = cache.reset_prefix_cache
    evict = cache.block_pool._maybe_evict_cached_block

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        while blocks is None and switch.run(lambda: make_room(request, *args, **kwargs), False):
            blocks = allocate(request, *args, **kwargs)
        if blocks is not None and request.num_computed_tokens == 0:
            given = parameters.bind(request, *args, **kwargs).arguments
            hit = given.get("num_new_computed_tokens", 0)
            hit += given.get("num_external_computed_tokens", 0)
            switch.run(lambda: tracker.look_up(request.request_id, hit), None)
        return blocks

    def make_room(request: Any, *args: Any, **kwargs: Any) -> bool:
        given = parameters.bind(request, *args, **kwargs).arguments
        # vLLM says only for waiting requests whether others run.
        if given.get("has_scheduled_reqs", True):
            return False
        found = given.get("new_computed_blocks")
        hit = {block.block_id for group in found.blocks for block in group} if found else set()
        return tracker.give_up(request.request_id) or leases.sacrifice(hit)

    def reset_prefix_cache() -> bool:
        """Let it succeed whenever it would without us, and end every entry then."""
        switch.run(lambda: tracker.give_back() if leases.is_sole_user() else None, None)
        return empty()

    def maybe_evict(block: Block) -> bool:
        """Count blocks whose content goes for other content, or because its load failed."""
        is_evicted = evict(block)
        if is_evicted:
            switch.run(leases.count_eviction, None)
        return is_evicted

    cache.allocate_slots = allocate_slots
    cache.reset_prefix_cache = reset_prefix_cache
    cache.block_pool._maybe_evict_cached_block = maybe_evict
    for manager in cache.coordinator.single_type_managers:
        _retain(manager, tracker, switch)


def _retain(manager: Any, tracker: RequestTracker, switch: Switch) -> None:
    """Have groups of windows and of states hash what a hit at a marked offset needs.

    By default (`prefix_cache_retention_interval` 0) they do so for the prompt's end only.
    """
    cache = manager.cache_blocks

    def cache_blocks(
        request: Any,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Any,
    ) -> None:
        none: list[int] = []
        marked = switch.run(lambda: tracker.boundaries(request.request_id), none)
        boundaries = (*replay_boundaries, *marked)
        cache(request, num_tokens, retention_interval, replay_boundaries=boundaries)

    manager.cache_blocks = cache_blocks
