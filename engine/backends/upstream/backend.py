"""An engine in front of a server that is not ours. The server computes; books, text and API are
ours.

A server that is not ours evicts when it wants and tells nobody. So an entry here is never leased:
it says what a scope has sent, and the server's own count of reused tokens decides what was read. An
entry ends when less of it was reused than it has. Then the request writes it anew.

Which server it is, and what it keeps to, is tried at the start. Nothing is taken from its version:
a flag that was left out shows only in what it answers.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from engine.backends.base import Progress
from engine.backends.contract import EngineBackend, Loaded
from engine.backends.external import ExternalLoop, MirrorCache, MirrorPool, new_order
from engine.backends.identity import identity_of
from engine.backends.prepare.images import Expanded, image_token_text
from engine.backends.prepare.pool import PreparePool, new_pool
from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.backends.reports import EventLog, pool_stats
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.images import ImageCounts, trial_order, trial_request, tried
from engine.backends.upstream.server import (
    Facts,
    ModelFacts,
    Slots,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamError,
    UpstreamGone,
    UpstreamRefused,
    Wire,
)
from engine.backends.upstream.servers import SERVERS, Piece, Server, find_kind
from engine.cache.block import Entry
from engine.cache.digests import TOKEN_BYTES, ChainHasher, pack
from engine.cache.entries import ARRIVAL_GRACE_SECONDS, Entries
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, Lookup
from engine.cache.table import BlockTable
from engine.clock import Clock
from engine.errors import NotReady, rebuilt
from engine.protocol import Capability, GenerateRequest, Tool, ToolChoice
from engine.protocol.reports import Description, LeaseStats, Stats
from engine.schedule.accounting import Accounting, Totals
from engine.schedule.output import OutputParser
from engine.schedule.request import ImagePrompt, SequenceState
from engine.settings import Settings
from engine.supervisor import Supervisor
from engine.text.renderer import ChatRenderer
from engine.text.template.boundaries import common_length
from engine.text.tokens.detokenize import longest_token_bytes

log = structlog.get_logger()

SILENCE_SECONDS = 300.0
"""Seconds without a byte after which a request has failed."""
PROBE_TOKENS = 160
GRAMMAR_TOKENS = 256
_HELLO = "Say hello."
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["zq-blue", "zq-green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


_APART_BY = {
    "salt": "cache_salt, tried at the start",
    "slots": "a slot is one scope's; another's content in it is computed over, tried at the start",
    "none": "the server knows no scopes",
}


def _unseen_request(num_words: int) -> GenerateRequest:
    return trial_request(" ".join(uuid4().hex for _ in range(num_words)))


async def examined(server: Server, renderer: ChatRenderer) -> Facts:
    """The facts, with those that only trying shows. Raises UpstreamError where the server fails."""
    facts = await server.find_facts()
    facts = await _with_reuse(server, renderer, facts)
    facts = await tried(server, renderer, facts)
    if facts.forced_note:
        return facts
    return await _with_grammars(server, renderer, facts)


async def _with_reuse(server: Server, renderer: ChatRenderer, facts: Facts) -> Facts:
    """The facts, with what the server tells of reuse, and whether it keeps scopes apart.

    One prompt is sent twice in one scope, and then in another scope after something else. (A cache
    behind the slots of llama.cpp shows only where a slot had other content meanwhile.)
    """
    # Nobody has sent such words before, so nothing can be reused at first. Each of 32 hexadecimal
    # digits has several tokens, so there are blocks of them.
    num_words = max(PROBE_TOKENS, 3 * (facts.block_size or 0)) // 12
    first = trial_order(renderer, _unseen_request(num_words))
    second = trial_order(renderer, _unseen_request(num_words))
    own_scope = uuid4().hex
    other_scope = uuid4().hex
    slots = Slots(1)
    pieces = list[Piece]()
    for order, scope in (
        (first, own_scope),
        (first, own_scope),
        (second, other_scope),
        (first, other_scope),
    ):
        async with slots.taken(scope, pack(order.token_ids)) as place:
            sent = replace(order, order_id=uuid4().hex, scope=scope)
            pieces.append(await server.prefill(sent, place))
    again = pieces[1].cached_tokens
    foreign = pieces[3].cached_tokens
    length = len(first.token_ids)
    # Prompts may begin alike by chance; a slot keeps that much of its scope's own.
    alike = common_length(pack(first.token_ids), pack(second.token_ids), TOKEN_BYTES)
    if pieces[1].prompt_tokens not in (None, length):
        note = f"not told: it counts {pieces[1].prompt_tokens} tokens of a prompt of {length}"
        facts = replace(facts, tells="never", tells_note=note)
    elif again is None or foreign is None:
        note = f"not told: {server.NOT_TOLD}"
        facts = replace(facts, tells="never", tells_note=note)
        facts = replace(facts, isolation="none", isolation_note=server.UNPROVEN)
    else:
        lack = "" if again else "; it reused nothing of a prompt that was sent twice"
        facts = replace(facts, tells_note=server.TOLD_BY + lack)
        if foreign <= alike:
            facts = replace(facts, isolation_note=_APART_BY[facts.isolation])
        elif facts.kind == "llamacpp":
            raise UpstreamRefused("slots share a cache in host memory: start it with --cache-ram 0")
        else:
            note = f"a second scope reused {foreign} tokens of the first one's prompt"
            facts = replace(facts, isolation="none", isolation_note=note)
    return facts


async def _with_grammars(server: Server, renderer: ChatRenderer, facts: Facts) -> Facts:
    """The facts, with what the server does with a grammar."""
    # They constrain an answer to a schema that no model writes by itself, and a call to one.
    capabilities: set[Capability] = set()
    if not renderer.can_constrain:
        return replace(facts, forced_note="the grammar library can't use the tokenizer")
    try:
        if await _keeps_to(server, renderer, trial_request(_HELLO, output_schema=_SCHEMA)):
            capabilities.add("structured_output")
            choice = ToolChoice("tool", name="paint")
            call = trial_request(_HELLO, tools=[Tool("paint", _SCHEMA)], tool_choice=choice)
            note = "the template has no tool calls that we know"
            if renderer.tool_format is not None:
                note = "it did not keep to a grammar of a call"
                if await _keeps_to(server, renderer, call):
                    capabilities.add("forced_tools")
                    note = "grammars, tried at the start"
        else:
            note = "it took a grammar and did not keep to it"
    except (UpstreamGone, UpstreamBusy):
        raise
    except UpstreamError as error:
        log.info("the upstream server takes no grammar", why=str(error))
        hint = "start it with --structured-outputs-config.backend guidance"
        note = f"it took no grammar: {hint}"
    return replace(facts, capabilities=facts.capabilities | capabilities, forced_note=note)


async def _keeps_to(server: Server, renderer: ChatRenderer, request: GenerateRequest) -> bool:
    parser = renderer.parser(request)
    order = trial_order(renderer, request, GRAMMAR_TOKENS)
    order = replace(order, end_token_ids=sorted(parser.end_token_ids), grammar=parser.grammar)
    async with aclosing(server.generate(order)) as pieces:
        async for piece in pieces:
            for token in piece.token_ids:
                parser.feed(token)
                if parser.finish is not None:
                    return parser.finish != "too_costly"
    return False


class UnheldEntries(Entries):
    """Entries without a lease: `no_hold`."""

    def lose(self, entry: Entry) -> None:
        """The entry's content is not whole in the server's memory any more."""
        if self.get(entry.key) is entry:
            self.end(entry, entry.why_broken)
            entry.is_broken = True

    def _try_lease(self, entry: Entry) -> bool:
        entry.why_unleased = "no_hold"
        return False


class UpstreamCache(MirrorCache):
    """`is_isolated`: no scope's prompt reuses what another scope sent.

    Where it is not isolated, reuse beyond a scope's own entries is not told: it would tell of
    others.
    """

    entries: UnheldEntries

    def __init__(
        self, pool: MirrorPool, entries: UnheldEntries, hasher: ChainHasher, *, is_isolated: bool
    ) -> None:
        super().__init__(pool, entries, hasher)
        self._is_isolated = is_isolated

    def admit(
        self, query: CacheQuery, lookup: Lookup, table: BlockTable, reused: int | None
    ) -> None:
        """The prompt is computed: `reused` of its tokens came from memory; None: not told."""
        is_whole = self._settle(query, lookup, reused or 0)
        hit = lookup.hit
        if not self._is_isolated:
            lookup.raced = min(lookup.raced, lookup.read)
            lookup.reused = lookup.read
        if hit is not None and reused is None:
            lookup.hit = None
            lookup.miss_reason = "not_told"
            lookup.missed |= {mark.segment: "not_told" for mark in lookup.marks}
        elif hit is not None and not is_whole:
            self.entries.lose(hit)
            lookup.miss_reason = "best_effort_evicted"
            self._lost(lookup)
            if not lookup.read:
                lookup.hit = None
        self._unwritten = set()
        try:
            self._mirror(query, table)
        except NoFreeBlocks:
            # Waiting requests have all blocks of the books: this prompt is not written down.
            self._unwritten = {mark.segment for mark in lookup.marks}
            lookup.marks = []


class UpstreamLoop(ExternalLoop):
    """`suspect` is called when a connection to the server broke."""

    _cache: UpstreamCache

    def __init__(
        self,
        server: Server,
        facts: Facts,
        accounting: Accounting,
        cache: UpstreamCache,
        event_loop: asyncio.AbstractEventLoop,
        supervisor: Supervisor,
        suspect: Callable[[], None],
        *,
        max_waiting: int,
    ) -> None:
        super().__init__(accounting, cache, event_loop, supervisor, max_waiting=max_waiting)
        self._server = server
        self._facts = facts
        self._max_context = facts.max_context_tokens
        self._slots = Slots(facts.max_running)
        self._suspect = suspect

    @property
    def num_sent(self) -> int:
        return self._slots.num_taken

    @property
    def num_unsent(self) -> int:
        return max(len(self._serving) - self.num_sent, 0)

    async def _generate(self, sequence: SequenceState) -> None:
        request = sequence.request
        query = request.query
        order = new_order(sequence, request.request_id, self._max_context)
        try:
            async with self._slots.taken(order.cache_salt, query.digests.packed) as place:
                if request.began_at is None:
                    request.began_at = self._clock.now()
                if request.started_at is None and self._facts.tells == "at_the_end":
                    self._admit(sequence, await self._server.prefill(order, place))
                    self._end_if_finished(sequence)
                if sequence in self._serving:
                    await self._take_pieces(sequence, self._server.generate(order, place))
        except UpstreamError as error:
            log.warning("the upstream server failed a request", why=str(error))
            if isinstance(error, UpstreamGone):
                self._suspect()
            if sequence in self._serving:
                self._fail(sequence, f"the upstream server failed: {error}", error.code)
        self._tell()

    async def _take_pieces(
        self, sequence: SequenceState, pieces: AsyncGenerator[Piece, None]
    ) -> None:
        """Take an answer's pieces until it ends, or until nobody waits for it."""
        # Closing the connection ends the request at the server.
        async with aclosing(pieces):
            async for piece in pieces:
                is_answer = piece.token_ids or piece.delta or piece.is_last
                if sequence.request.started_at is None and is_answer:
                    self._admit(sequence, piece)
                self._take(sequence, piece)
                if sequence not in self._serving:
                    return

    def _admit(self, sequence: SequenceState, piece: Piece) -> None:
        """The prompt is computed: what was reused is known now, or never will be."""
        request = sequence.request
        is_told = self._facts.tells != "never"
        assert request.lookup is not None
        if is_told and piece.cached_tokens is None:
            raise UpstreamError("the server did not say how much it reused")
        reused = piece.cached_tokens if is_told else None
        self._cache.admit(request.query, request.lookup, sequence.table, reused)
        self._started(sequence)

    def _take(self, sequence: SequenceState, piece: Piece) -> None:
        parser = sequence.parser
        if isinstance(parser, ChatParser):
            # Each delta counts as a token until the server tells how many there were.
            if piece.delta is not None and not parser.has_ended():
                deltas = parser.take(piece.delta, piece.finish_reason)
                self.accounting.text(sequence, deltas, sequence.num_output + bool(deltas))
                if parser.has_ended() and piece.finish_reason is None:
                    # Our parser ended it, so the server won't tell.
                    self.accounting.text(sequence, [], parser.count_written())
                    sequence.finish = parser.finish
            if piece.sampled_tokens is not None:
                self.accounting.text(sequence, [], piece.sampled_tokens)
        for token in piece.token_ids:
            if sequence.finish is not None:
                break
            self.accounting.token(sequence, token)
        if piece.is_last and sequence.finish is None:
            sequence.finish = parser.finish or piece.finish or "failed"
        self._end_if_finished(sequence)
        self._tell()


FIND_SECONDS = 300.0
"""How long a server may take to answer everything that is asked of it at the start."""
FIRST_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
"""Between two questions whether a server that is down at the start is there."""
WATCH_SECONDS = 2.0
MISSES = 3
"""A server is gone that did not answer so often in a row. A server that refuses connections is gone
at once."""
DEFAULT_CONTEXTS = 8


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is known once the server has been asked."""

    server: Server
    facts: Facts
    renderer: ChatRenderer
    # It lacks only the epoch.
    description: Description
    workers: PreparePool
    images: ImageCounts | None


class UpstreamBackend(EngineBackend):
    """While the server is away every call is refused as NotReady. When it is back a new epoch
    begins."""

    unpurged = ("what the server behind this engine keeps: it has its own ways to be reset",)

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
        self._worker = chat_worker(settings)
        self._asking: Future[_Parts] | None = None
        self._parts: _Parts | None = None
        self._is_suspect = asyncio.Event()
        self._is_stopped = False

    # Life.

    def load(self, progress: Progress) -> None:
        """Waits for a server that is down. Raises UpstreamRefused and TemplateRefused."""
        progress("loading tokenizer", 0.1)
        text = image_token_text(self._settings.model)
        self._worker = msgspec.structs.replace(self._worker, image_text=text)
        renderer = chat_renderer(self._worker)
        files = ModelFacts.of(self._settings.model, renderer)
        progress("asking the server", 0.5)
        asking = self._asking = asyncio.run_coroutine_threadsafe(
            self._wait_for_server(renderer, files, progress), self._event_loop
        )
        parts = self._parts = asking.result()
        self._begin(self._assemble(parts))
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
        pool = loaded.cache.pool
        loop = loaded.loop
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
        settings = self._settings

        async def ask() -> _Parts:
            key = settings.upstream_key.get_secret_value()
            wire = Wire(settings.upstream, key, SILENCE_SECONDS)
            async with AsyncExitStack() as closing:
                closing.push_async_callback(wire.close)
                kind = await find_kind(wire, settings.upstream_model)
                server = SERVERS[kind](wire, files, settings.upstream_model, settings.block_size)
                facts = await examined(server, renderer)
                closing.pop_all()
            if facts.isolation == "none":
                log.warning("SCOPES ARE NOT KEPT APART by this server", why=facts.isolation_note)
            description = self._description(facts, renderer, files)
            workers = new_pool(renderer, self._worker, description, settings, self._days)
            images = _image_counts(server, renderer, facts)
            return _Parts(server, facts, renderer, description, workers, images)

        said = ""
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                return await asyncio.wait_for(ask(), FIND_SECONDS)
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

    async def _watch_server(self, _stopping: asyncio.Event) -> None:
        """Raises UpstreamGone while the server is away: the engine is not ready while a loop
        fails."""
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
        """Whatever the server had in memory is gone. Requests fail; the final counts stay."""
        loaded = self._loaded
        self._loaded = None
        if loaded is None:
            return
        log.error("the upstream server is gone", why=reason)
        self._events.close()
        assert isinstance(loaded.loop, UpstreamLoop)
        await loaded.loop.fail_all("the upstream server is gone", "not_ready")

    async def _come_back(self, parts: _Parts) -> _Parts:
        """Begin a new epoch. Raises UpstreamError while the server is away. Another server than
        before ends the process."""
        try:
            facts = await examined(parts.server, parts.renderer)
        except UpstreamRefused as refusal:
            self._on_crash(RuntimeError(f"the upstream server came back as another one: {refusal}"))
            return parts
        if _lasting(facts) != _lasting(parts.facts):
            self._on_crash(RuntimeError("the upstream server came back as another one"))
            return parts
        known = replace(parts.facts, fingerprint=facts.fingerprint)
        images = _image_counts(parts.server, parts.renderer, known)
        parts = self._parts = replace(parts, facts=known, images=images)
        self._events = EventLog(epoch=uuid4().hex)
        self._loaded = self._assemble(parts)
        self._loaded.loop.start(self._on_crash)
        log.info("the upstream server is back", epoch=self._events.epoch)
        return parts

    async def _parsers(self, loaded: Loaded, request: GenerateRequest) -> Sequence[OutputParser]:
        """A server of conversations parses by itself."""
        parts = self._parts
        if parts is None or parts.facts.kind != "openai":
            return await super()._parsers(loaded, request)
        tokenizer = parts.renderer.tokenizer
        choices = range(request.sampling.num_choices)
        return [ChatParser(request, tokenizer) for _ in choices]

    async def _expand(self, image_prompt: ImagePrompt) -> Expanded:
        parts = self._parts
        if parts is None or parts.images is None:
            return await super()._expand(image_prompt)
        try:
            return await parts.images.expand(image_prompt)
        except UpstreamError as error:
            log.warning("the upstream server counted no image", why=str(error))
            if isinstance(error, UpstreamGone):
                self._is_suspect.set()
            raise rebuilt(error.code, str(error), is_public=False) from None

    def _ready(self) -> Loaded:
        if self._loaded is None and self._parts is not None:
            raise NotReady("the upstream server is away")
        return super()._ready()

    # Inside.

    def _assemble(self, parts: _Parts) -> Loaded:
        settings = self._settings
        description = self._whole(parts.description)
        pool = MirrorPool(description.num_blocks, description.block_size)
        entries = UnheldEntries(pool, lease_share=0.0, grace_seconds=ARRIVAL_GRACE_SECONDS)
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
            self._event_loop,
            self._supervisor,
            self._is_suspect.set,
            max_waiting=settings.max_waiting,
        )
        return Loaded(description, parts.renderer, parts.workers, cache, accounting, loop)

    def _description(self, facts: Facts, renderer: ChatRenderer, files: ModelFacts) -> Description:
        settings = self._settings
        block_size = facts.block_size or settings.block_size
        context = facts.max_context_tokens
        num_blocks = settings.num_blocks or facts.num_blocks
        capabilities: list[Capability] = [*sorted(facts.capabilities)]
        if facts.kind != "openai":
            capabilities.append("own_template")
        if renderer.tool_format is not None:
            capabilities.append("tools")
        if renderer.reasoning_format is not None and facts.kind != "openai":
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
            default_sampling=files.sampling,
            max_running=facts.max_running,
            longest_token_bytes=longest_token_bytes(renderer.tokenizer),
            identity=identity_of(settings.model, renderer, server=facts.model),
        )


def _image_counts(server: Server, renderer: ChatRenderer, facts: Facts) -> ImageCounts | None:
    return ImageCounts(server, renderer) if "images" in facts.capabilities else None


def _lasting(facts: Facts) -> tuple[Any, ...]:
    """What must be the same after the server's restart, for our description to stay true."""
    return (
        (facts.model, facts.version, facts.max_context_tokens, facts.max_running),
        (facts.block_size, facts.num_blocks),
        (facts.tells, facts.isolation, facts.capabilities),
    )
