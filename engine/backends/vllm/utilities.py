"""The calls of `directive.py`, as methods of vLLM's EngineCore: added, nothing is replaced.

They run between two steps in the scheduler's thread, and while it is idle. vLLM has no other way
for a connector to be asked (its RFC 51639 proposes one).
"""

from typing import Any

import msgspec
from vllm.v1.engine.core import EngineCore

from engine.backends.vllm import directive
from engine.backends.vllm.internals import check_scheduler
from engine.backends.vllm.leases import LeaseManager
from engine.backends.vllm.requests import RequestTracker


def add_utilities() -> None:
    """Add the calls, once or again."""
    calls = {
        directive.REPORT: _report,
        directive.RELEASE: _release,
        directive.REFRESH: _refresh,
        directive.LOSSES: _losses,
        directive.STATS: _stats,
        directive.HOLDS: _holds,
        directive.CORE_STATS: _core_stats,
    }
    for name, call in calls.items():
        setattr(EngineCore, name, call)


def find_connector(core: Any) -> tuple[LeaseManager, RequestTracker]:
    """Ours, alone or among a MultiConnector's; raises RuntimeError if there is none."""
    connector = core.scheduler.get_kv_connector()
    for candidate in (connector, *getattr(connector, "sub_connectors", ())):
        leases, tracker = (getattr(candidate, name, None) for name in ("leases", "tracker"))
        if isinstance(leases, LeaseManager) and isinstance(tracker, RequestTracker):
            return leases, tracker
    raise RuntimeError("this vLLM runs without HoldfastConnector")


def _report(self: Any, request_id: str) -> Any:
    return msgspec.to_builtins(find_connector(self)[1].report(request_id))


def _release(self: Any, keys: list[str]) -> int:
    return find_connector(self)[0].release(keys)


def _refresh(self: Any, expires_at: dict[str, float]) -> Any:
    return find_connector(self)[0].refresh(expires_at)


def _losses(self: Any) -> Any:
    return msgspec.to_builtins(find_connector(self)[0].take_losses())


def _stats(self: Any) -> Any:
    return msgspec.to_builtins(find_connector(self)[0].stats())


def _holds(self: Any) -> Any:
    return msgspec.to_builtins(find_connector(self)[0].holds())


def _core_stats(self: Any) -> Any:
    leases = find_connector(self)[0]
    scheduler = self.scheduler
    check_scheduler(scheduler)
    figures = leases.figures()
    stats = directive.CoreStats(
        **leases.block_states(),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        leased_blocks=figures["leased_blocks"],
        max_leased_blocks=figures["max_leased_blocks"],
        evicted_blocks=leases.evicted_blocks,
    )
    return msgspec.to_builtins(stats)
