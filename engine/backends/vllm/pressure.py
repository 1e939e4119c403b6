"""Where vLLM's cache manager must ask us or tell us: it has no room, is emptied, passes a window
or a block's content.

Each is a wrap of methods of the one instance; no class of vLLM's is changed.
"""

import inspect
from typing import Any

from engine.backends.vllm.internals import Block, CacheManager
from engine.backends.vllm.leases import LeaseManager
from engine.backends.vllm.requests import RequestTracker
from engine.backends.vllm.switch import Switch


def wrap_cache(
    cache: CacheManager, leases: LeaseManager, tracker: RequestTracker, switch: Switch
) -> None:
    relieve(cache, leases, tracker, switch)
    empty = cache.reset_prefix_cache
    evict = cache.block_pool._maybe_evict_cached_block

    def end_all() -> None:
        if leases.is_sole_user():
            tracker.give_back()

    def reset_prefix_cache() -> bool:
        """Let it succeed whenever it would without us, and end every entry then."""
        switch.run(end_all, None)
        return empty()

    def maybe_evict(block: Block) -> bool:
        """Count blocks whose content goes for other content, or because its load failed."""
        is_evicted = evict(block)
        if is_evicted:
            switch.run(leases.count_eviction, None)
        return is_evicted

    cache.reset_prefix_cache = reset_prefix_cache
    cache.block_pool._maybe_evict_cached_block = maybe_evict
    if len(cache.coordinator.single_type_managers) > 1:
        for manager in cache.coordinator.single_type_managers:
            _retain(manager, tracker, switch)


def relieve(
    cache: CacheManager, leases: LeaseManager, tracker: RequestTracker, switch: Switch
) -> None:
    """Prevent a stall with nothing running: waiting requests give up blocks, then leases end.

    While a request runs, vLLM decides: a request that does not fit waits, or a running one is
    preempted. The last running request preempts itself if it does not fit, and comes back as a
    waiting one.
    """
    allocate = cache.allocate_slots
    parameters = inspect.signature(allocate)

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        while blocks is None and switch.run(lambda: make_room(request, *args, **kwargs), False):
            blocks = allocate(request, *args, **kwargs)
        return blocks

    def make_room(request: Any, *args: Any, **kwargs: Any) -> bool:
        given = parameters.bind(request, *args, **kwargs).arguments
        # vLLM says only for waiting requests whether others run.
        if given.get("has_scheduled_reqs", True):
            return False
        found = given.get("new_computed_blocks")
        hit = {block.block_id for group in found.blocks for block in group} if found else set()
        return tracker.give_up(request.request_id) or leases.sacrifice(hit)

    cache.allocate_slots = allocate_slots


def _retain(manager: Any, tracker: RequestTracker, switch: Switch) -> None:
    """Have sliding-window groups hash what a hit at a marked offset needs.

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
