"""The backend that computes in this process, with our own scheduler, blocks and step.

Native and synthetic engines are this one. They differ only in the parts that they load.
"""

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from datetime import date
from functools import partial
from itertools import chain

from engine.approximate.asking import Approximations
from engine.backends.adapters import AdapterShelf
from engine.backends.base import Parts, Progress, on_event_loop
from engine.backends.contract import NO_BLOCKS, EngineBackend, Loaded
from engine.backends.measuring import measure_behind
from engine.backends.prepare.pool import new_pool
from engine.backends.reports import Count, cells_of, holdings_of, pool_stats
from engine.backends.storing import new_memory
from engine.cache.ids import Digest
from engine.cache.pool import PurgedBlocks
from engine.clock import Clock
from engine.protocol import MAX_CELLS
from engine.protocol.reports import LeaseStats, Memory, Stats
from engine.schedule.accounting import Accounting
from engine.schedule.loop import EngineLoop
from engine.schedule.scheduler import Scheduler
from engine.schedule.speculation import Speculation
from engine.settings import Settings


class LocalBackend(EngineBackend):
    """`load_parts` builds the model and what goes with it; called once, in a thread."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        load_parts: Callable[[Settings, Progress], Parts],
        on_crash: Callable[[BaseException], None],
        today: Callable[[], date] = date.today,
    ) -> None:
        super().__init__(settings, clock, on_crash, today)
        self._load_parts = load_parts
        self._scheduler: Scheduler | None = None
        self._loop: EngineLoop | None = None
        self._measuring: Future[None] | None = None

    def load(self, progress: Progress) -> None:
        parts = self._load_parts(self._settings, progress)
        self._adapters = AdapterShelf(parts.adapters)
        settings = self._settings
        description = self._whole(parts.description)
        memory = new_memory(settings, parts, description, self._clock)
        cache = memory.cache
        store = memory.store
        max_step_tokens = settings.max_step_tokens or parts.step_tokens
        speculation = None
        if parts.new_drafter is not None:
            speculation = Speculation(
                parts.new_drafter,
                max_step_tokens=max_step_tokens,
                max_context_tokens=description.max_context_tokens,
            )
        self._scheduler = scheduler = Scheduler(
            cache,
            max_step_tokens=max_step_tokens,
            max_running=settings.max_running,
            speculation=speculation,
        )
        accounting = Accounting(
            cache,
            self._clock,
            partial(on_event_loop, self._event_loop, self._events.publish),
            epoch=description.epoch,
            max_context_tokens=description.max_context_tokens,
        )
        disk = store.disk if store is not None else None
        self._loop = loop = EngineLoop(
            scheduler,
            accounting,
            parts.runner,
            max_waiting=settings.max_waiting,
            store=disk,
            model_seconds=parts.model_seconds,
        )
        if store is not None:
            # Let the engine's thread take the results of the store's threads.
            store.wake_by(partial(loop.call, lambda: None))
        pool = new_pool(parts.renderer, parts.worker, description, settings, self._days)
        self._begin(
            Loaded(
                description,
                parts.renderer,
                pool,
                cache,
                accounting,
                loop,
                store,
                memory.store_stats,
                parts.approximate,
            )
        )
        if parts.approximate.is_measuring:
            self._measure(loop, parts.approximate, scheduler)

    def _measure(self, loop: EngineLoop, approximate: Approximations, scheduler: Scheduler) -> None:
        """Begin to measure, behind what is served. An error ends the engine, as an error of the
        load does."""

        async def call(function: Callable[[], float | None]) -> float | None:
            return await asyncio.wrap_future(loop.call(function))

        def note_end(measuring: "Future[None]") -> None:
            error = None if measuring.cancelled() else measuring.exception()
            if error is not None:
                self._on_crash(error)

        work = measure_behind(approximate, call, lambda: scheduler.has_work)
        self._measuring = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        self._measuring.add_done_callback(note_end)

    async def stop(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
        await super().stop()

    async def stats(self) -> Stats:
        def look(loaded: Loaded) -> Stats:
            scheduler = self._scheduler
            cache = loaded.cache
            assert scheduler is not None
            pool = cache.pool
            leases = cache.entries.leases
            host = cache.host
            counters = {
                "copied_blocks": pool.num_copied,
                "evicted_blocks": pool.num_evicted,
                "leases_lowered": leases.num_lowered,
                "preempted_requests": scheduler.num_preempted,
                "demoted_blocks": host.num_demoted if host is not None else 0,
                "promoted_blocks": host.num_promoted if host is not None else 0,
            }
            return self._report(
                loaded,
                counters,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                blocks=pool_stats(pool),
                leases=LeaseStats(blocks=pool.num_leased, max_blocks=leases.max_blocks),
                num_leases=cache.entries.num_leases,
                host_blocks=host.pool.num_blocks if host is not None else 0,
                host_blocks_used=host.num_used if host is not None else 0,
                store=loaded.store_stats(),
            )

        return await self._ask(look)

    async def _purge_blocks(
        self, loaded: Loaded, owner: Digest | None
    ) -> tuple[PurgedBlocks, PurgedBlocks]:
        loop = self._loop
        assert loop is not None
        host = loaded.cache.host
        device_blocks = await self._purge_pool(loaded, loaded.cache.pool, owner, loop.purge)
        if host is None:
            return device_blocks, NO_BLOCKS
        return device_blocks, await self._purge_pool(loaded, host.pool, owner, loop.purge)

    async def memory(self) -> Memory:
        """A part of the pool between two steps, so that none waits long for it."""
        loaded = self._ready()
        pool = loaded.cache.pool
        host = loaded.cache.host
        blocks_per_cell = math.ceil(pool.num_blocks / MAX_CELLS)
        owners = await self._owners(loaded)
        parts = await self._parts_of(loaded, cells_of(loaded.cache, blocks_per_cell, owners))
        counted = sum((part.holdings for part in parts), start=Count())

        def report() -> Memory:
            return Memory(
                epoch=loaded.description.epoch,
                block_size=pool.block_size,
                blocks_per_cell=blocks_per_cell,
                cells=list(chain.from_iterable(part.cells for part in parts)),
                referenced_blocks=sum(part.num_referenced for part in parts),
                unused_tokens=sum(part.unused_tokens for part in parts),
                host=None if host is None else pool_stats(host.pool),
                holdings=holdings_of(counted),
                lifetimes=loaded.cache.entries.lifetimes.report(),
            )

        return await self._call(loaded, report)
