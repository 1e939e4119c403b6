"""The calls of `directive.py`, as methods of vLLM's EngineCore: added, nothing is replaced.

They run between two steps in the scheduler's thread, and while it is idle. vLLM has no other way
for a connector to be asked (its RFC 51639 proposes one). vLLM passes what a call raises on to its
caller. All but `SWITCH_OFF` raise SwitchedOff once the connector is off.
"""

from typing import Any, NamedTuple

import msgspec
from vllm.v1.engine.core import EngineCore

from engine.backends.vllm import directive
from engine.backends.vllm.internals import check_scheduler
from engine.backends.vllm.leases import LeaseManager
from engine.backends.vllm.requests import RequestTracker
from engine.backends.vllm.switch import Switch


class Held(NamedTuple):
    """Our parts in one vLLM's scheduler."""

    leases: LeaseManager
    tracker: RequestTracker
    switch: Switch


def add_utilities() -> None:
    """Add the calls, once or again."""
    calls = {
        directive.BIND: _bind,
        directive.SWITCH_OFF: _switch_off,
        directive.REPORT: _report,
        directive.RELEASE: _release,
        directive.UNLEASE: _unlease,
        directive.REFRESH: _refresh,
        directive.LOSSES: _losses,
        directive.STATS: _stats,
        directive.HOLDS: _holds,
        directive.CORE_STATS: _core_stats,
    }
    for name, call in calls.items():
        setattr(EngineCore, name, call)


def find_connector(core: Any) -> Held:
    """Ours, alone or among a MultiConnector's; raises RuntimeError if there is none."""
    connector = core.scheduler.get_kv_connector()
    for candidate in (connector, *getattr(connector, "sub_connectors", ())):
        names = ("leases", "tracker", "switch")
        leases, tracker, switch = (getattr(candidate, name, None) for name in names)
        if isinstance(leases, LeaseManager) and isinstance(tracker, RequestTracker):
            assert isinstance(switch, Switch)
            return Held(leases, tracker, switch)
    raise RuntimeError("this vLLM runs without HoldfastConnector")


def _running(core: Any) -> Held:
    found = find_connector(core)
    found.switch.check()
    return found


def _bind(self: Any, token: str) -> None:
    _running(self).tracker.bind(token)


def _switch_off(self: Any, reason: str) -> None:
    find_connector(self).switch.turn_off(reason)


def _report(self: Any, request_id: str) -> Any:
    return msgspec.to_builtins(_running(self).tracker.report(request_id))


def _release(self: Any, keys: list[str]) -> int:
    return _running(self).leases.release(keys)


def _unlease(self: Any, keys: list[str]) -> None:
    _running(self).leases.unlease(keys)


def _refresh(self: Any, expires_at: dict[str, float]) -> Any:
    return _running(self).leases.refresh(expires_at)


def _losses(self: Any) -> Any:
    return msgspec.to_builtins(_running(self).leases.take_losses())


def _stats(self: Any) -> Any:
    return msgspec.to_builtins(_running(self).leases.stats())


def _holds(self: Any) -> Any:
    return msgspec.to_builtins(_running(self).leases.holds())


def _core_stats(self: Any) -> Any:
    leases, tracker, _ = _running(self)
    scheduler = self.scheduler
    check_scheduler(scheduler)
    figures = leases.figures()
    stats = directive.CoreStats(
        **leases.block_states(_blocks_of(scheduler, tracker)),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        foreign_running=sum(
            request.request_id not in tracker.request_ids for request in scheduler.running
        ),
        leased_blocks=figures["leased_blocks"],
        max_leased_blocks=figures["max_leased_blocks"],
        evicted_blocks=leases.evicted_blocks,
    )
    return msgspec.to_builtins(stats)


def _blocks_of(scheduler: Any, tracker: RequestTracker) -> set[int]:
    """The ids of the blocks that tracked requests use."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {
        block.block_id
        for manager in managers
        for request_id in tracker.request_ids
        for block in manager.req_to_blocks.get(request_id, ())
    }
