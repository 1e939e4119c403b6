"""An engine in front of a server that is not ours: it computes; books, text and API are ours."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import structlog

from engine.backends.base import Progress, Renderer
from engine.backends.events import EventLog
from engine.backends.external import MirrorPool
from engine.backends.looped import EngineBackend, Loaded
from engine.backends.prepare.pool import PreparePool
from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.backends.reports import pool_stats
from engine.backends.storing import EngineMemory
from engine.backends.upstream.chat import ChatServerRenderer
from engine.backends.upstream.loop import UnheldEntries, UpstreamCache, UpstreamLoop
from engine.backends.upstream.probe import examined, new_server
from engine.backends.upstream.server import Facts, ModelFacts, Server, UpstreamRefused
from engine.backends.upstream.wire import UpstreamDenied, UpstreamError, UpstreamGone
from engine.cache.digests import ChainHasher
from engine.cache.entries import ARRIVAL_GRACE_SECONDS
from engine.clock import Clock
from engine.errors import NotReady
from engine.protocol import Capability, Description, LeaseStats, Stats
from engine.schedule.accounting import Accounting, Totals
from engine.settings import Settings
from engine.supervisor import Supervisor
from engine.text.renderer import ChatRenderer
from engine.text.tokens.detokenize import longest_token_bytes

log = structlog.get_logger()

FIND_SECONDS = 300.0
"""How long a server may take to answer everything that is asked of it at the start."""
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
"""Between two questions whether a server that is down at the start is there."""
WATCH_SECONDS = 2.0
MISSES = 3
"""A server that does not answer this often in a row is gone; one that refuses is at once."""
DEFAULT_CONTEXTS = 8


@dataclass(frozen=True, slots=True)
class _Parts:
    """`description` lacks only the epoch."""

    server: Server
    facts: Facts
    renderer: ChatRenderer
    description: Description
    workers: PreparePool


class UpstreamBackend(EngineBackend):
    """While the server is away every call is refused as NotReady; after it a new epoch begins."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        on_crash: Callable[[BaseException], None],
        supervisor: Supervisor,
    ) -> None:
        super().__init__(settings, clock, on_crash)
        self._supervisor = supervisor
        self._totals = Totals()
        self._asking: Future[_Parts] | None = None
        self._parts: _Parts | None = None
        self._is_suspect = asyncio.Event()
        self._is_stopped = False

    # Life.

    def load(self, progress: Progress) -> None:
        """Waits for a server that is down. Raises UpstreamRefused and TemplateRefused."""
        progress("loading tokenizer", 0.1)
        renderer = chat_renderer(chat_worker(self._settings))
        files = ModelFacts.of(self._settings.model, renderer)
        progress("asking the server", 0.5)
        asking = self._asking = asyncio.run_coroutine_threadsafe(
            self._wait_for_server(renderer, files, progress), self._event_loop
        )
        parts = self._parts = asking.result()
        self._loaded = self._assemble(parts)
        self._loaded.loop.start(self._on_crash)
        self._event_loop.call_soon_threadsafe(
            self._supervisor.start, "upstream", self._watch_server
        )

    async def stop(self) -> None:
        self._is_stopped = True
        if self._asking is not None:
            self._asking.cancel()
        await super().stop()
        if self._parts is not None:
            await self._parts.workers.close()
            await self._parts.server.close()

    async def stats(self) -> Stats:
        loaded = self._ready()
        pool, loop = loaded.cache.pool, loaded.loop
        assert isinstance(loop, UpstreamLoop)
        return self._report(
            loaded,
            {"evicted_blocks": pool.num_evicted},
            running=loop.num_sent,
            waiting=loop.num_unsent,
            blocks=pool_stats(pool),
            leases=LeaseStats(blocks=0, max_blocks=0),
        )

    # The server.

    async def _wait_for_server(
        self, renderer: ChatRenderer, files: ModelFacts, progress: Progress
    ) -> _Parts:
        """Ask until the server answers. Raises UpstreamRefused where no waiting helps."""
        said, pause = "", FIRST_PAUSE_SECONDS
        while True:
            try:
                return await asyncio.wait_for(self._ask(renderer, files), FIND_SECONDS)
            except UpstreamDenied as error:
                raise UpstreamRefused(str(error)) from None
            except (UpstreamError, TimeoutError) as error:
                why = str(error) or f"it did not answer all questions in {FIND_SECONDS:.0f} s"
            if why != said:
                log.warning("waiting for the upstream server", why=why)
                progress(f"waiting for the upstream server: {why}", 0.5)
            said = why
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _ask(self, renderer: ChatRenderer, files: ModelFacts) -> _Parts:
        server = await new_server(self._settings, files)
        async with AsyncExitStack() as closing:
            closing.push_async_callback(server.close)
            facts = await examined(server, renderer)
            closing.pop_all()
        if facts.isolation == "none":
            log.warning("SCOPES ARE NOT KEPT APART by this server", why=facts.isolation_note)
        description = self._description(facts, renderer, files)
        workers = self._new_pool(renderer, chat_worker(self._settings), description)
        return _Parts(server, facts, renderer, description, workers)

    async def _watch_server(self) -> None:
        """Raises UpstreamGone while the server is away: a failing loop is no ready engine."""
        parts = self._parts
        assert parts is not None
        if self._loaded is None:
            parts = await self._come_back(parts)
        misses = 0
        while not self._is_stopped:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_suspect.wait(), WATCH_SECONDS)
            was_suspect = self._is_suspect.is_set()
            self._is_suspect.clear()
            try:
                fingerprint = await parts.server.fingerprint()
            except UpstreamError as error:
                misses += 1
                if was_suspect or isinstance(error, UpstreamGone) or misses >= MISSES:
                    await self._lose(str(error))
                    raise
                continue
            misses = 0
            if fingerprint != parts.facts.fingerprint:
                await self._lose("the server was started anew")
                parts = await self._come_back(parts)

    async def _lose(self, reason: str) -> None:
        """Whatever the server held is gone. Requests fail; the final counts stay."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        log.error("the upstream server is gone", why=reason)
        self._events.close()
        assert isinstance(loaded.loop, UpstreamLoop)
        await loaded.loop.fail_all("the upstream server is gone", "not_ready")

    async def _come_back(self, parts: _Parts) -> _Parts:
        """Raises UpstreamError while it is away; another server than before ends the process."""
        try:
            facts = await examined(parts.server, parts.renderer)
        except UpstreamRefused as refusal:
            self._on_crash(RuntimeError(f"the upstream server came back as another one: {refusal}"))
            return parts
        if _lasting(facts) != _lasting(parts.facts):
            self._on_crash(RuntimeError("the upstream server came back as another one"))
            return parts
        known = replace(parts.facts, fingerprint=facts.fingerprint)
        parts = self._parts = replace(parts, facts=known)
        self._events = EventLog(epoch=uuid4().hex)
        self._loaded = self._assemble(parts)
        self._loaded.loop.start(self._on_crash)
        log.info("the upstream server is back", epoch=self._events.epoch)
        return parts

    def _ready(self) -> Loaded:
        if self._loaded is None and self._parts is not None:
            raise NotReady("the upstream server is away")
        return super()._ready()

    # Inside.

    def _assemble(self, parts: _Parts) -> Loaded:
        settings, description = self._settings, self._whole(parts.description)
        pool = MirrorPool(description.num_blocks, description.block_size)
        entries = UnheldEntries(
            pool, ttl_scale=settings.ttl_scale, grace_seconds=ARRIVAL_GRACE_SECONDS
        )
        hasher = ChainHasher(os.urandom(32), description.block_size)
        is_isolated = parts.facts.isolation != "none"
        cache = UpstreamCache(pool, entries, hasher, is_isolated=is_isolated)
        accounting = Accounting(
            cache,
            self._clock,
            self._events.publish,
            epoch=description.epoch,
            max_context_tokens=description.max_context_tokens,
            totals=self._totals,
        )
        loop = UpstreamLoop(
            parts.server,
            parts.facts,
            accounting,
            cache,
            self._clock,
            self._event_loop,
            self._supervisor,
            self._is_suspect.set,
            max_waiting=settings.max_waiting,
        )
        renderer: Renderer = parts.renderer
        if parts.facts.is_chat:
            renderer = ChatServerRenderer(parts.renderer)
        memory = EngineMemory(cache)
        return Loaded(description, renderer, parts.workers, memory, accounting, loop)

    def _description(self, facts: Facts, renderer: ChatRenderer, files: ModelFacts) -> Description:
        settings = self._settings
        block_size = facts.block_size or settings.block_size
        context = facts.max_context_tokens
        num_blocks = settings.num_blocks or facts.num_blocks
        capabilities: list[Capability] = [*sorted(facts.capabilities)]
        if not facts.is_chat:
            capabilities.append("own_template")
        if renderer.tool_format is not None:
            capabilities.append("tools")
        if renderer.reasoning_format is not None and not facts.is_chat:
            capabilities.append("thinking")
        return Description(
            backend="upstream",
            upstream=facts.kind,
            model=Path(settings.model).name,
            epoch="",
            max_context_tokens=context,
            block_size=block_size,
            num_blocks=num_blocks or DEFAULT_CONTEXTS * context // block_size,
            granularity=block_size,
            min_cache_tokens=settings.min_cache_tokens,
            capabilities=capabilities,
            guarantees=facts.guarantees(),
            prefix_order=renderer.prefix_order,
            tool_format=renderer.tool_format,
            reasoning_format=renderer.reasoning_format,
            default_temperature=files.temperature,
            default_top_p=files.top_p,
            default_top_k=files.top_k,
            ttl_scale=settings.ttl_scale,
            max_running=facts.max_running,
            longest_token_bytes=longest_token_bytes(renderer.tokenizer),
        )


def _lasting(facts: Facts) -> tuple[Any, ...]:
    """What must be the same after a restart, for our description to stay true."""
    return (
        (facts.model, facts.version, facts.max_context_tokens, facts.max_running),
        (facts.block_size, facts.num_blocks),
        (facts.tells, facts.isolation, facts.capabilities),
    )
