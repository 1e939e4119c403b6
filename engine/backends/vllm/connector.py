"""A KV connector for vLLM that moves no data: it holds leases on vLLM's own blocks.

    --kv-transfer-config '{"kv_connector": "HoldfastConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "engine.backends.vllm.connector",
        "kv_connector_extra_config": {"lease_share": 0.25, "scope_lease_share": 0.5}}'

`kv_consumer` is refused as its role: for a consumer vLLM defers the return of every block. As with
any connector, vLLM can't have encoder-decoder models, nor `expandable_segments:True` of PyTorch's
allocator.
"""

import functools
import hmac
import inspect
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from engine.backends.vllm.arguments import lease_shares, role_problem
from engine.backends.vllm.directive import (
    CALL,
    PARAM_KEY,
    Bound,
    CoreStats,
    Directive,
    Report,
    WantOutcome,
)
from engine.backends.vllm.internals import (
    CacheManager,
    Request,
    VllmBlock,
    VllmChangedError,
    check_layers,
)
from engine.backends.vllm.leases import Blocks, LeaseManager, VllmEntry
from engine.backends.vllm.names import check_names
from engine.backends.vllm.plugin import register
from engine.backends.vllm.switch import Switch, guarded
from engine.schedule.request import Ranges
from engine.store.journal import Record

logger = init_logger(f"vllm.{__name__}")
MAX_ENDED = 4_096
"""Ended requests whose reports are kept."""


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request of vLLM's that carries a directive."""

    directive: Directive
    request: Request
    # The blocks of the entry that it will read, until it is admitted.
    protected: Blocks | None = None
    is_admitted: bool = False
    # What vLLM's last look-up found.
    found_tokens: int = 0
    # What of that was reused. Each admission and each step up to the first token can lower it.
    hit_tokens: int = 0
    # How many of its wants, in order of length, have become entries or can't.
    num_taken: int = 0
    # How many of its watches, in order of length, have begun.
    num_watched: int = 0
    # The entries that end with it if it gets no token.
    claims: list[VllmEntry] = field(default_factory=list)
    # The length of each entry by its want's key.
    made_tokens: dict[str, int] = field(default_factory=dict)
    # The positions of the prompt that were scheduled before the first token.
    computed: Ranges = field(default_factory=Ranges)

    @property
    def is_started(self) -> bool:
        return self.request.num_output_tokens > 0


class RequestTracker:
    """Turns what the scheduler tells of requests into protection, entries and reports.

    vLLM's request ids are not ours: vLLM adds a suffix, and each choice of a request has its own.
    So states are kept by vLLM's ids, and reports are asked for by the directives' ids. Not
    thread-safe: all calls come from the scheduler's thread.
    """

    def __init__(self, leases: LeaseManager) -> None:
        self._leases = leases
        self._token: bytes | None = None
        self._states: dict[str, TrackedRequest] = {}
        self._wanting: dict[str, TrackedRequest] = {}
        self._by_id: dict[str, TrackedRequest] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.num_preempted = 0

    def bind(self, token: str) -> None:
        """Follow only directives with this token. Everything that an earlier server held ends."""
        self.give_back()
        self._leases.take_losses()
        self._token = token.encode()

    @property
    def request_ids(self) -> Collection[str]:
        """vLLM's ids of the tracked requests."""
        return self._states.keys()

    # What the scheduler tells.

    def arrive(self, request: Request) -> str | None:
        """Protect the blocks that a request will read.

        The result says why its directive can't be followed. None if it is followed, or if there is
        none.
        """
        transfer = request.kv_transfer_params
        params = transfer.get(PARAM_KEY) if isinstance(transfer, Mapping) else None
        if params is None:
            return None
        token = params.get("token") if isinstance(params, Mapping) else None
        # JSON can hold halves of characters (surrogates), which UTF-8 refuses by itself.
        token_bytes = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else b""
        if self._token is None or not hmac.compare_digest(token_bytes, self._token):
            return "it does not carry the server's token"
        try:
            directive = msgspec.convert(params, Directive)
        except msgspec.ValidationError as error:
            return str(error)
        state = TrackedRequest(directive, request)
        directive.wants.sort(key=lambda want: want.tokens)
        directive.watches.sort(key=lambda watch: watch.tokens)
        self._leases.set_share(directive.scope, directive.lease_blocks)
        self._leases.expect(directive.wants, request.block_hashes, directive.unix_offset)
        if directive.read is not None:
            state.protected = self._leases.protect(directive.read)
        self._states[request.request_id] = state
        self._by_id.setdefault(directive.request_id, state)
        self._ended.pop(directive.request_id, None)
        self._want(state)
        return None

    def look_up(self, request_id: str, hit_tokens: int) -> None:
        """Note what vLLM found in its cache. It may look up again before it admits the request."""
        state = self._states.get(request_id)
        if state is not None:
            state.found_tokens = hit_tokens

    def admit(self, request: Request) -> None:
        """Note that a request has its blocks, for the first time or after it was preempted."""
        self.num_preempted += request.num_preemptions > 0
        state = self._states.get(request.request_id)
        if state is None or state.is_started:
            return
        if state.is_admitted:
            # `hit_tokens` does not rise: a later admission also finds what the request computed
            # itself, and that is no reuse. vLLM's own `num_cached_tokens` stays the first one's.
            # Preempted before its first token: what was lost with a reset is to be held anew.
            state.num_taken = state.num_watched = 0
            self._want(state)
        else:
            state.hit_tokens = state.found_tokens
        state.is_admitted = True
        self._unprotect(state)

    def schedule(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Note what a new step computes, and make the entries whose blocks it has hashed."""
        for request_id, num_scheduled in num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and not state.is_started:
                start = state.request.num_computed_tokens
                num_prompt_tokens = state.request.num_prompt_tokens
                # Lost by a preemption, or not loaded by another connector: it is computed.
                state.hit_tokens = min(state.hit_tokens, start)
                end = min(start + num_scheduled, num_prompt_tokens)
                if end > start:
                    state.computed.add(start, end)
        for request_id, state in list(self._wanting.items()):
            scheduled = num_scheduled_tokens.get(request_id)
            if scheduled is not None:
                # vLLM adds the step's tokens to `num_computed_tokens` after this call.
                self._take(state, state.request.num_computed_tokens + scheduled)

    def end(self, request_id: str) -> None:
        """Note that a request has finished, failed or was aborted.

        If it ends before its first token, the entries that it made end with it.
        """
        state = self._states.pop(request_id, None)
        if state is None:
            return
        self._wanting.pop(request_id, None)
        self._unprotect(state)
        for entry in state.claims:
            self._leases.end_claim(entry, request_id, is_started=state.is_started)
        our_id = state.directive.request_id
        if self._by_id.get(our_id) is state:
            self._ended[our_id] = None
            if len(self._ended) > MAX_ENDED:
                oldest, _ = self._ended.popitem(last=False)
                del self._by_id[oldest]

    # Under pressure.

    def give_up(self, except_id: str) -> bool:
        """Let the newest waiting request give up its protected blocks. False if none has any.

        The request `except_id` keeps its own.
        """
        for request_id, state in reversed(self._states.items()):
            if request_id != except_id and state.protected is not None:
                self._unprotect(state)
                return True
        return False

    def give_back(self) -> None:
        """End every protection and every entry: the cache is emptied, or another server binds."""
        for state in self._states.values():
            self._unprotect(state)
        self._leases.reset()

    # What the server asks, and the managers of sliding windows.

    def report(self, request_id: str) -> Report | None:
        """The report by the directive's id. Of ended requests the last 4,096 are remembered."""
        state = self._by_id.get(request_id)
        if state is None:
            return None
        held = [
            WantOutcome(
                key=want.key, state=self._leases.state(want.key), tokens=state.made_tokens[want.key]
            )
            if want.key in state.made_tokens
            else WantOutcome(key=want.key, state="none", tokens=0)
            for want in state.directive.wants
        ]
        return Report(
            request_id=request_id,
            hit_tokens=state.hit_tokens,
            held=held,
            computed_tokens=state.computed.total,
        )

    def boundaries(self, request_id: str) -> list[int]:
        """The offsets at which this request is marked, where a hit can end, in rising order.

        Later requests may begin there.
        """
        state = self._states.get(request_id)
        if state is None:
            return []
        return [self._leases.align(want.tokens) for want in state.directive.wants]

    def cut(self, request_id: str, start: int, num_tokens: int) -> int:
        """How many tokens of a chunk come in front of the first boundary inside it."""
        end = start + num_tokens
        inside = (offset for offset in self.boundaries(request_id) if start < offset < end)
        return next(inside, end) - start

    # Inside.

    def _take(self, state: TrackedRequest, computed_tokens: int) -> None:
        """Begin the watches and make the entries that these computed tokens reach."""
        directive = state.directive
        request = state.request
        first = state.num_watched
        wants = directive.wants
        watches = directive.watches
        while state.num_watched < len(watches) and (
            watches[state.num_watched].tokens <= computed_tokens
        ):
            state.num_watched += 1
        self._leases.watch(watches[first : state.num_watched], request.block_hashes)
        while state.num_taken < len(wants):
            want = wants[state.num_taken]
            if self._leases.align(want.tokens) > computed_tokens:
                return
            state.num_taken += 1
            if want.tokens > request.num_prompt_tokens:
                continue
            entry = self._leases.add(
                want, directive.scope, request.block_hashes, request.request_id
            )
            if entry is not None:
                state.made_tokens[want.key] = entry.tokens
                if entry not in state.claims:
                    state.claims.append(entry)
        if state.num_watched == len(watches):
            del self._wanting[request.request_id]

    def _want(self, state: TrackedRequest) -> None:
        if state.directive.wants or state.directive.watches:
            self._wanting[state.request.request_id] = state

    def _unprotect(self, state: TrackedRequest) -> None:
        if state.protected is not None:
            self._leases.unprotect(state.protected)
            state.protected = None


NO_METADATA = KVConnectorMetadata()
"""The workers are told nothing."""


class HoldfastConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM makes one in the scheduler's process and one in each worker. The workers' do nothing.

    Raises ValueError at the start for a role or a setting that can't be, without prefix caching,
    for layers of a kind that is not known, and for a drafter that drops the last block of hits
    (EAGLE, MTP). In a vLLM whose names have changed it is off from the start.
    """

    leases: LeaseManager
    tracker: RequestTracker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.switch = Switch()
        register()  # MultiConnector looks us up by name, with or without the entry point
        if role == KVConnectorRole.SCHEDULER:
            wrong_role = role_problem(self._kv_transfer_config.kv_role)
            if wrong_role is not None:
                raise ValueError(wrong_role)
            if kv_cache_config is not None:
                check_layers(kv_cache_config.kv_cache_groups)
            add_utilities()
            try:
                check_names("scheduler")
            except VllmChangedError as error:
                logger.error("Holdfast is off: %s. vLLM goes on.", error)
                self.switch.turn_off(str(error))
            else:
                cut_at_marks()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # The workers' side. There is nothing to do, whatever the arguments are.

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        return

    def wait_for_layer_load(self, *_: Any, **__: Any) -> None:
        return

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        return

    def wait_for_save(self, *_: Any, **__: Any) -> None:
        return

    # The scheduler's side.

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if not self.switch.is_on:
            return
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
        problem = self.tracker.arrive(request)
        if problem is not None:
            logger.warning_once("A directive was ignored: %s", problem)

    @guarded((0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False  # `wrap_cache` notes what vLLM found when the request gets its blocks

    @guarded(None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.tracker.admit(request)

    @guarded(NO_METADATA)
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self.tracker.schedule(scheduler_output.num_scheduled_tokens)
        return NO_METADATA

    @guarded((False, None))
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.tracker.end(request.request_id)
        return False, None

    @guarded((False, None))
    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def reset_cache(self, *_: Any, **__: Any) -> bool:
        """We have no store behind vLLM's cache. The reset of vLLM's cache has ended the leases."""
        return True

    @guarded(None)
    def _note_reuse(self, block: Any) -> None:
        self.leases.note_reuse(block)


# The server's calls (`directive.py`) are methods that are added to vLLM's EngineCore. None of its
# own is replaced. The calls run in the scheduler's thread, between two steps and while it is idle.
# vLLM has no other way to ask a connector (its RFC 51639 proposes one). What a call raises, vLLM
# passes on to the caller. All but `switch_off` raise SwitchedOff once the connector is off.


_records = msgspec.json.Decoder(list[Record])


def add_utilities() -> None:
    """Add the calls. It does no harm to add them again."""
    to_builtins = msgspec.to_builtins
    calls: dict[str, Callable[..., Any]] = {
        "bind": _bind,
        "switch_off": lambda core, reason: find_connector(core).switch.turn_off(reason),
        "report": lambda core, of: to_builtins(_running(core).tracker.report(of)),
        "release": lambda core, keys: _running(core).leases.release(keys),
        "unlease": lambda core, keys: _running(core).leases.unlease(keys),
        "record": lambda core, records: _running(core).leases.record(_records.decode(records)),
        "losses": lambda core: to_builtins(_running(core).leases.take_losses()),
        "core_stats": _core_stats,
    }
    for name, call in calls.items():
        setattr(EngineCore, CALL.format(name), call)


def find_connector(core: Any) -> HoldfastConnector:
    """Our connector, alone or in a MultiConnector. Raises RuntimeError if there is none."""
    connector = _of(core.scheduler)
    if connector is None:
        raise RuntimeError("this vLLM runs without HoldfastConnector")
    return connector


def _of(scheduler: Any) -> HoldfastConnector | None:
    connector = scheduler.get_kv_connector()
    candidates = (connector, *getattr(connector, "sub_connectors", ()))
    return next(
        (candidate for candidate in candidates if isinstance(candidate, HoldfastConnector)), None
    )


def cut_at_marks() -> None:
    """Have vLLM's schedulers end a hybrid's chunk at a marked offset, so that a state is kept.

    Without this chunks end at boundaries of blocks, at the prompt's last one, and where an earlier
    prompt parted from this one.
    """
    split = Scheduler._mamba_block_aligned_split
    if hasattr(split, "__wrapped__"):
        return

    parameters = inspect.signature(split)

    @functools.wraps(split)
    def split_at_marks(self: Scheduler, *args: Any, **kwargs: Any) -> int:
        num: int = split(self, *args, **kwargs)
        connector = _of(self)
        if connector is None or not connector.switch.is_on:
            return num

        def cut() -> int:
            _, request, _, *computed = parameters.bind(self, *args, **kwargs).arguments.values()
            start = request.num_computed_tokens + sum(computed)
            return connector.tracker.cut(request.request_id, start, num)

        return connector.switch.run(cut, num)

    setattr(Scheduler, split.__name__, split_at_marks)


def _bind(core: Any, token: str) -> Any:
    connector = _running(core)
    leases = connector.leases
    bound = Bound()
    # Our tier in an OffloadingConnector beside this one (`tiers.py`), if there is one.
    below = None
    for beside in getattr(core.scheduler.get_kv_connector(), "sub_connectors", ()):
        manager: Any = getattr(getattr(beside, "connector_scheduler", None), "manager", None)
        for tier in getattr(manager, "secondary_tiers", ()):
            if below is None and hasattr(tier, "take_restored"):
                below = tier
                tier.above = manager.primary_tier._policy
    leases.below = below
    connector.tracker.bind(token)
    if below is not None:
        entries = leases.restore()
        bound = Bound(max_blocks=below.max_blocks, chain=below.chain, entries=entries)
    return msgspec.to_builtins(bound)


def _running(core: Any) -> HoldfastConnector:
    connector = find_connector(core)
    connector.switch.check()
    return connector


def _core_stats(core: Any) -> Any:
    connector = _running(core)
    scheduler = core.scheduler
    leases = connector.leases
    tracker = connector.tracker
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    our_ids = {
        block.block_id
        for manager in managers
        for request_id in tracker.request_ids
        for block in manager.req_to_blocks.get(request_id, ())
    }
    stats = CoreStats(
        blocks=leases.block_states(our_ids),
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        foreign_running=sum(
            request.request_id not in tracker.request_ids for request in scheduler.running
        ),
        leased_blocks=leases.num_leased_blocks,
        max_leased_blocks=leases.max_leased_blocks,
        preempted=tracker.num_preempted,
        evicted_blocks=leases.evicted_blocks,
        leases_lowered=leases.num_lowered,
        store=None if leases.below is None else leases.below.stats(),
    )
    return msgspec.to_builtins(stats)


def wrap_cache(
    cache: CacheManager, leases: LeaseManager, tracker: RequestTracker, switch: Switch
) -> None:
    """Wrap the methods that vLLM calls of its cache.

    This prevents a stall with nothing running: waiting requests give up protected blocks, and then
    leases end. While a request runs, vLLM decides alone. A request that does not fit waits, or a
    running one is preempted. If the last running request does not fit, it preempts itself and
    comes back as a waiting request.
    """
    allocate = cache.allocate_slots
    parameters = inspect.signature(allocate)
    empty = cache.reset_prefix_cache
    evict = cache.block_pool._maybe_evict_cached_block

    def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = allocate(request, *args, **kwargs)
        while blocks is None and switch.run(lambda: make_room(request, *args, **kwargs), False):
            blocks = allocate(request, *args, **kwargs)
        if blocks is not None:
            switch.run(lambda: note_hit(request, *args, **kwargs), None)
        return blocks

    def note_hit(request: Any, *args: Any, **kwargs: Any) -> None:
        if request.num_computed_tokens:
            return
        arguments = parameters.bind(request, *args, **kwargs).arguments
        hit = arguments.get("num_new_computed_tokens", 0)
        hit += arguments.get("num_external_computed_tokens", 0)
        tracker.look_up(request.request_id, hit)

    def make_room(request: Any, *args: Any, **kwargs: Any) -> bool:
        arguments = parameters.bind(request, *args, **kwargs).arguments
        # vLLM passes this for waiting requests alone: whether other requests run.
        if arguments.get("has_scheduled_reqs", True):
            return False
        hit_blocks = arguments.get("new_computed_blocks")
        groups = hit_blocks.blocks if hit_blocks else ()
        hit = {block.block_id for group in groups for block in group}
        return tracker.give_up(request.request_id) or leases.sacrifice(hit)

    def reset_prefix_cache() -> bool:
        """Let a reset succeed whenever it would without us. Then every entry ends."""
        switch.run(lambda: tracker.give_back() if leases.is_sole_user() else None, None)
        return empty()

    def maybe_evict(block: VllmBlock) -> bool:
        """Count blocks whose content makes way for other content, or whose load failed."""
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
    """Have groups of windows and of states hash the blocks that a hit at a marked offset needs.

    By default (`prefix_cache_retention_interval` 0) they hash them for the prompt's end only.
    """
    cache = manager.cache_blocks

    def cache_blocks(request: Any, *args: Any, replay_boundaries: Any, **kwargs: Any) -> None:
        no_boundaries: list[int] = []
        boundaries = switch.run(lambda: tracker.boundaries(request.request_id), no_boundaries)
        cache(request, *args, replay_boundaries=(*replay_boundaries, *boundaries), **kwargs)

    manager.cache_blocks = cache_blocks
