"""The part that all backends share: preparation, accounting, the loop that computes, reports."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import msgspec
import structlog

from engine.approximate.asking import Approximations, ExactRequest, asks_for_any
from engine.approximate.prompt import ApproximatePrompt
from engine.approximate.request import ApproximateRequest
from engine.backends.adapters import AdapterShelf
from engine.backends.base import Body, Generation, Progress, own_guarantees
from engine.backends.prepare.constraints import may_compile
from engine.backends.prepare.images import Expanded, Widening, widened
from engine.backends.prepare.pool import MAX_WORKERS, PreparePool
from engine.backends.prepare.prepared import COUNT, GENERATE, Counted, Prepared
from engine.backends.prepare.preparer import check_length
from engine.backends.prepare.session_days import SessionDays
from engine.backends.queries import new_samples, query_of
from engine.backends.renderer import Renderer
from engine.backends.reports import (
    MAX_BLOCKS_A_STEP,
    EventLog,
    chains_held,
    entry_holdings,
    entry_infos,
    holdings_of,
    owners_of,
)
from engine.backends.storing import OpenStore
from engine.cache.block import Block, Entry
from engine.cache.digests import ChainKind
from engine.cache.entries import ARRIVAL_GRACE_SECONDS
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool, PurgedBlocks
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.clock import Clock, ManualClock
from engine.errors import InvalidRequest, NotFound, NotReady, Unsupported
from engine.protocol import (
    TTLS,
    Capability,
    ChainHeld,
    CountReply,
    DropReply,
    DropRequest,
    EventFrame,
    FinalCounts,
    GenerateRequest,
    KeptRecord,
    PurgeReply,
    PurgeRequest,
    Snapshot,
)
from engine.protocol.reports import (
    AdapterInfo,
    Counters,
    Description,
    EntryInfo,
    LeaseEnd,
    Memory,
    Stats,
    StoreStats,
)
from engine.schedule.accounting import Accounting
from engine.schedule.output import OutputParser
from engine.schedule.request import ImagePrompt, RequestState
from engine.schedule.runner import SampleParams
from engine.schedule.token_masks import step_back
from engine.settings import Settings

T = TypeVar("T")
log = structlog.get_logger()

STORE_FLUSH_SECONDS = 5.0
"""Seconds that a planned end may take to write what the store still lacks."""
MAX_DROP_SECONDS = 10.0
"""Seconds that a drop waits until its files are deleted."""
_decode = msgspec.json.Decoder(GenerateRequest)


class Loop(Protocol):
    """The engine's steps. `call` runs a function between two steps, from any thread."""

    def start(self, on_crash: Callable[[BaseException], None]) -> None: ...
    def stop(self) -> None: ...
    def call(self, function: Callable[[], T]) -> "Future[T]": ...
    def submit(self, request: RequestState, samples: list[SampleParams]) -> None: ...
    def cancel(self, request_id: str) -> bool: ...


NO_BLOCKS = PurgedBlocks([], [], [])


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of an engine that is up. `loop` owns all but the first three."""

    description: Description
    renderer: Renderer
    preparation: PreparePool
    cache: PrefixCache
    accounting: Accounting
    loop: Loop
    store: OpenStore | None = None
    store_stats: Callable[[], StoreStats | None] = lambda: None
    approximate: Approximations = field(default_factory=Approximations)


class EngineBackend:
    """What the server and every engine agree on.

    The lifecycle, in this order; the server keeps it and every backend MUST:
    1. construction is cheap and touches nothing outside;
    2. `load` (in a thread) brings the model up and reports progress; raising ends the start;
    3. after it returns, every other method works, from the event loop's thread, concurrently;
    4. `open` either raises an EngineError with nothing changed, or leaves a request that ends on
       every path: by itself, by `cancel`, or by closing its stream;
    5. `end_events` ends every stream of events, those that begin afterwards too; everything else
       goes on, and it may come at any time;
    6. `stop` ends everything; it may come at any time, also after a failed `load`.

    `scope` is the scope in the header of a request whose body is bytes. Workers are shared fairly
    between scopes. `today` gives the day that a template writes into new prefixes.
    """

    # Descriptions of the content that a purge can't remove.
    unpurged: tuple[str, ...] = ()

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        today: Callable[[], date] = date.today,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._on_crash = on_crash
        self._events = EventLog(epoch=uuid4().hex)
        # Compiling takes a tenth of a second of processor time, at a lower priority than the step.
        # A worker has compiled the same grammar before. So with a thread for each worker no scope
        # can fill all threads.
        self._compilers = ThreadPoolExecutor(MAX_WORKERS, "compile", initializer=step_back)
        self._event_loop = asyncio.get_running_loop()
        self._born_at = clock.now()
        # A conversation without a lease goes on within the hour, or begins on a new day.
        grace = ARRIVAL_GRACE_SECONDS
        usual = TTLS["1h"].seconds + grace
        self._days = SessionDays(clock, today, seconds=usual, grace_seconds=grace)
        self._loaded: Loaded | None = None
        self._why_ended = ""
        self._adapters = AdapterShelf()

    def load(self, progress: Progress) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        await self._adapters.stop()
        if self._loaded is not None:
            await self._loaded.preparation.close()
            await asyncio.to_thread(self._loaded.loop.stop)
            if self._loaded.store is not None:
                await asyncio.to_thread(self._loaded.store.close, STORE_FLUSH_SECONDS)

    # Generation.

    def check_epoch(self, epoch: str) -> None:
        """Raise NotReady if a generation is meant for another epoch. An empty `epoch` fits all."""
        if epoch not in ("", self._ready().description.epoch):
            raise NotReady("this engine was started anew: ask for its description")

    async def open(self, body: Body, scope: str = "") -> Generation:
        loaded = self._ready()
        received_at = self._clock.now()
        prepared, image_prompt = await self._prepared(loaded, body, scope)
        request = _decode.decode(prepared.request)
        query = await asyncio.to_thread(
            query_of,
            request,
            prepared,
            loaded.cache,
            loaded.description,
            self._adapters.acting,
            arrived_at=received_at - request.age_seconds,
        )
        adapter = query.adapter
        new_request: Callable[..., RequestState] = RequestState
        if asks_for_any(request):
            prompt = await asyncio.to_thread(_approximate_prompt, loaded, request, query, prepared)
            query = prompt.query
            new_request = partial(
                ApproximateRequest, prompt=prompt, compressor=loaded.approximate.compressor
            )
        generation = Generation(
            self._event_loop, cancel=partial(self._cancel_soon, loaded, request.request_id)
        )
        state = new_request(
            request=request,
            query=query,
            parsers=await self._parsers(loaded, request),
            emit=generation.emit,
            submitted_at=received_at,
            spelled=loaded.renderer.spelled,
            unheld=prepared.unheld,
            folded=prepared.folded,
            inexact=prepared.inexact,
            image_prompt=image_prompt,
        )
        await self._submit(loaded, state, adapter)
        generation.is_open = True
        return generation

    async def _prepared(
        self, loaded: Loaded, body: Body, scope: str
    ) -> tuple[Prepared, ImagePrompt | None]:
        """The body as a worker prepared it. The place of each image has all of its tokens."""
        prepared = await loaded.preparation.run(GENERATE, *_prepared_as(body, scope))
        assert isinstance(prepared, Prepared)
        if not prepared.images:
            return prepared, None
        image_prompt = ImagePrompt(array("I", prepared.token_ids).tolist(), prepared.images)
        expanded = await self._expand(image_prompt)
        check_length(len(expanded.token_ids), loaded.description)
        prepared = await asyncio.to_thread(widened, prepared, expanded, loaded.description)
        return prepared, image_prompt

    async def _submit(self, loaded: Loaded, state: RequestState, adapter: ChainKind | None) -> None:
        """Hand a request to the loop. A caller that stops waiting for this cancels the request."""
        samples = new_samples(state.request, loaded.description)

        def submit() -> None:
            self._adapters.check_attached(adapter)
            loaded.loop.submit(state, samples)

        def take_back(submitted: "Future[None]") -> None:
            if not submitted.cancelled() and submitted.exception() is None:
                self._cancel_soon(loaded, state.request_id)

        future = loaded.loop.call(submit)
        try:
            await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # it ends here or in the loop
            future.add_done_callback(take_back)
            raise

    async def cancel(self, request_id: str) -> bool:
        return await self._ask(lambda loaded: loaded.loop.cancel(request_id))

    async def count(self, body: Body, scope: str = "") -> CountReply:
        answer = await self._ready().preparation.run(COUNT, *_prepared_as(body, scope))
        assert isinstance(answer, Counted)
        if not answer.images:
            return answer.reply
        image_prompt = ImagePrompt(array("I", answer.token_ids).tolist(), answer.images)
        expanded = await self._expand(image_prompt)
        widening = Widening(image_prompt.token_ids, expanded)
        ends = answer.reply.segment_tokens
        return CountReply(
            len(expanded.token_ids), [None if end is None else widening.end(end) for end in ends]
        )

    async def _expand(self, image_prompt: ImagePrompt) -> Expanded:
        """The tokens of a prompt with images. Raises ImageRefused."""
        raise Unsupported("this engine reads no images")

    # Reports.

    @property
    def awaited(self) -> str:
        """What a loaded engine waits for while it refuses all calls. Empty: nothing."""
        return ""

    def describe(self) -> Description:
        loaded = self._ready()
        return loaded.approximate.describe(self._adapters.told(loaded.description))

    def events(self, epoch: str | None, after: int | None) -> AsyncIterator[EventFrame]:
        self._ready()
        return self._events.subscribe(epoch, after, self.snapshot)

    def end_events(self) -> None:
        self._events.close()

    async def snapshot(self) -> Snapshot:
        """The names that are held. They are read in parts between steps, so that no step waits."""
        loaded = self._ready()
        seq = await self._call(loaded, lambda: loaded.accounting.num_published)
        chains = await self._parts_of(loaded, chains_held(loaded.cache, self._clock.now))
        return Snapshot(
            seq=seq, epoch=loaded.description.epoch, chains=list(chain.from_iterable(chains))
        )

    def held(self, names: Sequence[str]) -> list[ChainHeld]:
        self._ready()
        return self._events.held(names)

    async def entries(
        self, scope: str | None = None, limit: int | None = None, after: str | None = None
    ) -> list[EntryInfo]:
        loaded = self._ready()
        owners = await self._owners(loaded)
        infos = partial(entry_infos, loaded.cache, self._clock.now, owners, scope, limit, after)
        return await self._call(loaded, infos)

    async def stats(self) -> Stats:
        raise NotImplementedError

    async def memory(self) -> Memory:
        """The memory without a map, because our books have only blocks with entries or names."""
        loaded = self._ready()
        owners = await self._owners(loaded)
        return Memory(
            epoch=loaded.description.epoch,
            block_size=loaded.description.block_size,
            holdings=holdings_of(entry_holdings(owners)),
            lifetimes=loaded.cache.entries.lifetimes.report(),
        )

    async def drop(self, request: DropRequest) -> DropReply:
        loaded = self._ready()
        try:
            key = None if request.entry is None else Digest(bytes.fromhex(request.entry))
        except ValueError:
            raise InvalidRequest("entry: not hexadecimal") from None
        reason: LeaseEnd = "released" if request.by == "owner" else "dropped"
        drop_entries = partial(loaded.accounting.drop, request.scope, key, reason)
        reply = await self._call(loaded, drop_entries)
        if loaded.store is not None:
            root = loaded.cache.digests(request.scope, []).root
            drop = partial(loaded.store.disk.drop, root, key)
            written = await self._call(loaded, drop)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(written), MAX_DROP_SECONDS)
        return reply

    async def purge(self, request: PurgeRequest) -> PurgeReply:
        """Remove a scope's content, or everybody's, from memory and the store."""
        loaded = self._ready()
        scope = request.scope
        owner = None if scope is None else loaded.cache.digests(scope, []).root
        disk = None if loaded.store is None else loaded.store.disk
        num_files = 0 if disk is None else await self._call(loaded, disk.num_files)
        drop = partial(loaded.accounting.drop, scope, None, "dropped")
        entries = (await self._call(loaded, drop)).dropped
        if disk is not None:
            written = await self._call(loaded, partial(disk.purge, owner))
            num_files -= await self._call(loaded, disk.num_files)
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(written), MAX_DROP_SECONDS)
        device, host = await self._purge_blocks(loaded, owner)
        files = [await self._purge_pool(loaded, tier.pool, owner) for tier in loaded.cache.stores]
        num_busy = sum(len(purged.busy) for purged in (device, host, *files))
        # Workers remember the texts that they tokenized, and a process's memory ends with it.
        loaded.preparation.renew()
        await self._call(loaded, loaded.accounting.publish)
        return PurgeReply(
            entries=entries,
            device_blocks=len(device.empty),
            host_blocks=len(host.empty),
            files=num_files,
            busy_blocks=num_busy,
            unpurged=list(self.unpurged),
        )

    async def _purge_blocks(
        self, loaded: Loaded, owner: Digest | None
    ) -> tuple[PurgedBlocks, PurgedBlocks]:
        """The purged blocks of the device and of the host.

        None are purged here. A backend whose blocks are in its own memory overrides this.
        """
        return NO_BLOCKS, NO_BLOCKS

    async def _purge_pool(
        self,
        loaded: Loaded,
        pool: BlockPool,
        owner: Digest | None,
        purge: "Callable[[BlockPool, Digest | None, int, int], PurgedBlocks]" = BlockPool.purge,
    ) -> PurgedBlocks:
        """Purge a pool in parts between steps, so that no step waits long."""
        begins = range(0, pool.num_blocks, MAX_BLOCKS_A_STEP)
        parts = (purge(pool, owner, begin, begin + MAX_BLOCKS_A_STEP) for begin in begins)
        purged_parts = await self._parts_of(loaded, parts)
        return PurgedBlocks(
            empty=[block_id for part in purged_parts for block_id in part.empty],
            tails=[tail for part in purged_parts for tail in part.tails],
            busy=[block_id for part in purged_parts for block_id in part.busy],
        )

    async def load_adapter(self, name: str) -> AdapterInfo:
        loaded = self._ready()
        return await self._adapters.load(name, partial(self._call, loaded), loaded.accounting)

    async def unload_adapter(self, name: str) -> AdapterInfo:
        loaded = self._ready()
        return self._adapters.unload(name, partial(self._call, loaded), loaded.accounting)

    async def unacknowledged(self) -> list[FinalCounts]:
        return await self._ask(lambda loaded: loaded.accounting.totals.unacknowledged())

    async def acknowledge(self, request_ids: Sequence[str]) -> None:
        await self._ask(lambda loaded: loaded.accounting.totals.acknowledge(request_ids))

    async def records(self, request_ids: Sequence[str]) -> list[KeptRecord]:
        return await self._ask(lambda loaded: loaded.accounting.totals.records(request_ids))

    async def advance_clock(self, seconds: float) -> float:
        clock = self._clock
        if not isinstance(clock, ManualClock):
            raise NotFound("the clock is not manual")
        if not 0 <= seconds < 1e9:
            raise InvalidRequest("seconds: must be at least 0 and less than 1e9")

        def advance(loaded: Loaded) -> float:
            clock.advance(seconds)
            loaded.accounting.expire(clock.now())
            loaded.accounting.publish()
            return clock.now()

        return await self._ask(advance)

    # Inside.

    def _begin(self, loaded: Loaded) -> None:
        """Start the loop. Wait in the loading thread until a prompt can be prepared."""
        self._loaded = loaded
        loaded.loop.start(self._on_crash)
        asyncio.run_coroutine_threadsafe(loaded.preparation.warm(), self._event_loop).result()

    def _report(self, loaded: Loaded, counters: Mapping[str, int], **figures: Any) -> Stats:
        """The figures of every backend, with the backend's own `counters` and `figures`."""
        totals = loaded.accounting.totals
        entries = loaded.cache.entries
        return Stats(
            epoch=loaded.description.epoch,
            uptime_seconds=self._clock.now() - self._born_at,
            counters=Counters(
                **totals.counters,
                **counters,
                evicted_entries=entries.lifetimes.num_evicted,
                leases_granted=entries.leases.num_granted,
            ),
            num_entries=len(entries),
            num_automatic=entries.num_automatic,
            unacknowledged=totals.num_unacknowledged,
            prefill_seconds=totals.prefill_seconds,
            distributions=totals.distributions(),
            prefill_times=msgspec.structs.replace(loaded.accounting.prefill_times),
            **figures,
        )

    def _whole(self, description: Description) -> Description:
        """The description with this start's epoch, the loop's capabilities and the guarantees."""
        added: list[Capability] = ["lookback_to"]
        unkept = {promise.name for promise in description.guarantees if not promise.is_kept}
        if "isolation" not in unkept:
            added.append("cache_salt")
        if isinstance(self._clock, ManualClock):
            added.append("manual_clock")
        capabilities = [*description.capabilities, *added]
        return msgspec.structs.replace(
            description,
            epoch=self._events.epoch,
            capabilities=capabilities,
            role=self._settings.role,
            keeps_records=True,
            ttls=tuple(TTLS),
            takes_releases=True,
            guarantees=description.guarantees or own_guarantees(capabilities),
        )

    def _ready(self) -> Loaded:
        if self._loaded is None:
            raise NotReady(self._why_ended or "the model is loading")
        return self._loaded

    async def _parsers(self, loaded: Loaded, request: GenerateRequest) -> Sequence[OutputParser]:
        make = partial(loaded.renderer.parsers, request)
        if may_compile(request):
            return await self._event_loop.run_in_executor(self._compilers, make)
        return await asyncio.to_thread(make)

    async def _ask(self, function: Callable[[Loaded], T]) -> T:
        loaded = self._ready()
        return await self._call(loaded, partial(function, loaded))

    async def _call(self, loaded: Loaded, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(loaded.loop.call(function))

    async def _owners(self, loaded: Loaded) -> dict[Block, Entry]:
        owners = dict[Block, Entry]()
        await self._parts_of(loaded, owners_of(loaded.cache, owners))
        return owners

    async def _parts_of(self, loaded: Loaded, parts: Iterator[T]) -> list[T]:
        """All parts, each taken between two steps."""
        items = list[T]()
        while (item := await self._call(loaded, partial(next, parts, None))) is not None:
            items.append(item)
        return items

    def _cancel_soon(self, loaded: Loaded, request_id: str) -> None:
        def log_failure(future: "Future[bool]") -> None:
            error = future.exception()
            if error is not None:
                log.error("cancel failed", error=type(error).__name__)

        loaded.loop.call(partial(loaded.loop.cancel, request_id)).add_done_callback(log_failure)


def _prepared_as(body: Body, scope: str) -> tuple[bytes, str]:
    return (body, scope) if isinstance(body, bytes) else (msgspec.json.encode(body), body.scope)


def _approximate_prompt(
    loaded: Loaded, request: GenerateRequest, query: CacheQuery, prepared: Prepared
) -> ApproximatePrompt:
    """The prompt of a request that asks for anything approximate. Raises FieldRefused."""
    exact = ExactRequest(
        request=request,
        query=query,
        begins=prepared.begins,
        has_images=bool(prepared.keys),
    )
    return loaded.approximate.prompt_of(exact, loaded.cache)
