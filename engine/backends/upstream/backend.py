"""An engine in front of a server that is not ours. The server computes. Books, text and API are
this engine's.

Such a server evicts when it wants and tells nobody. So an entry here is not leased, unless the
server saves its slots in files. An entry says what a scope has sent, and the server's own count of
reused tokens decides what was read. An entry ends when fewer tokens were reused than it has. The
request then writes it anew.

The server's kind and abilities are tried at the start. Its version proves nothing, because a
missing flag shows only in its answers.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import structlog

from engine.backends.base import Progress
from engine.backends.contract import MAX_DROP_SECONDS, EngineBackend, Loaded
from engine.backends.external import MirrorPool
from engine.backends.identity import identity_of
from engine.backends.prepare.images import Expanded, image_token_text
from engine.backends.prepare.pool import PreparePool, new_pool
from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.backends.reports import EventLog, pool_stats
from engine.backends.upstream.books import UnheldEntries, UpstreamCache
from engine.backends.upstream.chat import ChatParser
from engine.backends.upstream.images import ImageCounts, trial_order, trial_request, tried
from engine.backends.upstream.loop import UpstreamLoop
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
from engine.backends.upstream.slots.books import DiskPlan, FileEntries, SlotCache
from engine.backends.upstream.slots.files import SlotFiles, take_directory
from engine.backends.upstream.slots.loop import SlotLoop, SlotPlan
from engine.backends.upstream.slots.server import SlotServer
from engine.backends.upstream.slots.trial import FLAGS, NoLeases, SlotTrial, try_leases
from engine.cache.digests import TOKEN_BYTES, ChainHasher, pack
from engine.cache.entries import ARRIVAL_GRACE_SECONDS
from engine.clock import Clock
from engine.errors import NotReady, rebuilt
from engine.protocol import (
    Capability,
    DropReply,
    DropRequest,
    GenerateRequest,
    PurgeReply,
    PurgeRequest,
    Tool,
    ToolChoice,
)
from engine.protocol.reports import Description, LeaseStats, Stats, StoreStats
from engine.schedule.accounting import Accounting, Totals
from engine.schedule.output import OutputParser
from engine.schedule.request import ImagePrompt
from engine.settings import Settings
from engine.store.files import StoreDirectory, StoreRefused
from engine.supervisor import Supervisor
from engine.text.renderer import ChatRenderer
from engine.text.template.boundaries import common_length
from engine.text.tokens.detokenize import longest_token_bytes

log = structlog.get_logger()

SILENCE_SECONDS = 300.0
"""A request fails after this many seconds without a byte."""
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


async def examined(server: Server, renderer: ChatRenderer, *, may_share: bool = False) -> Facts:
    """The server's facts, with those that only a trial shows.

    Raises UpstreamError if the server fails, and UpstreamRefused for a llama.cpp whose slots share
    a cache. With `may_share` it counts as a server that keeps no scopes apart instead.
    """
    facts = await server.find_facts()
    facts = await _with_reuse(server, renderer, facts)
    if facts.kind == "llamacpp" and facts.isolation == "none" and not may_share:
        raise UpstreamRefused(facts.isolation_note)
    facts = await tried(server, renderer, facts)
    if facts.forced_note:
        return facts
    return await _with_grammars(server, renderer, facts)


async def _with_reuse(server: Server, renderer: ChatRenderer, facts: Facts) -> Facts:
    """The facts, with how the server tells of reuse and whether it keeps scopes apart.

    One prompt is sent twice in one scope, then another prompt and the first one in a second scope.
    (llama.cpp's cache behind its slots shows only after a slot had other content.)
    """
    # Nobody has sent such random words before, so at first nothing can be reused. Each word has 32
    # hexadecimal digits and several tokens, so the prompt fills whole blocks.
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
    # The two prompts begin alike, at least by the template. The second scope may reuse that much of
    # its own first prompt.
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
        else:
            note = f"a second scope reused {foreign} tokens of the first one's prompt"
            if facts.kind == "llamacpp":
                note = "slots share a cache in host memory: start it with --cache-ram 0"
            facts = replace(facts, isolation="none", isolation_note=note)
    return facts


async def _with_grammars(server: Server, renderer: ChatRenderer, facts: Facts) -> Facts:
    """The facts, with the capabilities that need grammars, as far as the server follows them."""
    # One grammar is of an answer, the other of a call. No model writes such JSON by itself.
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


FIND_SECONDS = 300.0
"""How long a server may take for all trials at the start."""
FIRST_PAUSE_SECONDS = 0.25
"""The first pause before a server that is down at the start is tried again. Each pause is twice the
last."""
MAX_PAUSE_SECONDS = 10.0
"""The longest of these pauses."""
WATCH_SECONDS = 2.0
"""The pause between two looks whether the server lives."""
MISSES = 3
"""A server counts as gone after this many looks in a row without an answer. A server that refuses
connections counts as gone at once."""
DEFAULT_CONTEXTS = 8
"""How many full contexts our books have blocks for, if neither server nor settings tell."""


class _Leases(NamedTuple):
    """The trial and the slot files of a server that keeps leases."""

    trial: SlotTrial
    files: SlotFiles


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts that are made once the server has been examined."""

    server: Server
    facts: Facts
    renderer: ChatRenderer
    # The engine's description without its epoch.
    description: Description
    workers: PreparePool
    images: ImageCounts | None
    # None: the server keeps no leases.
    trial: SlotTrial | None = None
    # None: the server keeps no leases.
    files: SlotFiles | None = None
    # Why it keeps no leases though ENGINE_UPSTREAM_SLOTS asks for them.
    lack: StoreStats | None = None


class UpstreamBackend(EngineBackend):
    """The engine in front of one server.

    While the server is away, every call is refused as NotReady. When it is back, a new epoch
    begins.
    """

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
        # The manifest of slot files, or why there is none. None: the settings ask for none.
        self._manifest: StoreDirectory | StoreRefused | None = None
        self._is_suspect = asyncio.Event()
        self._is_stopped = False

    # Life.

    def load(self, progress: Progress) -> None:
        """Load the tokenizer, and wait until the server is there.

        Raises UpstreamRefused and TemplateRefused.
        """
        progress("loading tokenizer", 0.1)
        text = image_token_text(self._settings.model)
        self._worker = msgspec.structs.replace(self._worker, image_text=text)
        renderer = chat_renderer(self._worker)
        files = ModelFacts.of(self._settings.model, renderer)
        if self._settings.upstream_slots:
            # The trials use the server's slots, so the lock comes before all of them.
            self._manifest = _manifest_in(Path(self._settings.upstream_slots))
        progress("asking the server", 0.5)
        asking = self._asking = asyncio.run_coroutine_threadsafe(
            self._wait_for_server(renderer, files, progress), self._event_loop
        )
        parts = self._parts = asking.result()
        loaded = self._assemble(parts)
        self._begin(loaded)
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
            if self._parts.files is not None:
                await asyncio.to_thread(self._parts.files.close)
        if isinstance(self._manifest, StoreDirectory):
            self._manifest.close()

    @property
    def awaited(self) -> str:
        return "" if self._loaded is not None else "waiting for the upstream server"

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
            leases=LeaseStats(
                blocks=pool.num_leased, max_blocks=loaded.cache.entries.leases.max_blocks
            ),
            num_leases=loaded.cache.entries.num_leases,
            store=self._store_stats(loop),
            slots_away=loop.num_away if isinstance(loop, SlotLoop) else 0,
        )

    def _store_stats(self, loop: UpstreamLoop) -> StoreStats | None:
        """The counts of the slot files; None if the settings ask for none."""
        if isinstance(loop, SlotLoop):
            return loop.store_stats()
        return None if self._parts is None else self._parts.lack

    async def drop(self, request: DropRequest) -> DropReply:
        reply = await super().drop(request)
        loaded = self._ready()
        if isinstance(loaded.loop, SlotLoop):
            await loaded.loop.sweep(MAX_DROP_SECONDS)
        return reply

    async def purge(self, request: PurgeRequest) -> PurgeReply:
        loaded = self._ready()
        loop = loaded.loop
        num_files = loop.num_files if isinstance(loop, SlotLoop) else 0
        reply = await super().purge(request)
        if isinstance(loop, SlotLoop):
            await self._call(loaded, partial(loop.forget, request.scope))
            await loop.sweep(MAX_DROP_SECONDS)
            num_files -= loop.num_files
            num_slots = loop.num_unerased(request.scope)
            unpurged = list[str]()
            if num_slots:
                unpurged.append(
                    f"slots in use ({num_slots}): each is erased once it is at rest; purge again "
                    "for what their requests have written by then"
                )
            reply = msgspec.structs.replace(reply, files=num_files, unpurged=unpurged)
        return reply

    # The server.

    async def _wait_for_server(
        self, renderer: ChatRenderer, files: ModelFacts, progress: Progress
    ) -> _Parts:
        """Try until the server answers. Raises UpstreamRefused if waiting can't help."""
        settings = self._settings

        async def ask() -> _Parts:
            key = settings.upstream_key.get_secret_value()
            has_slots = bool(settings.upstream_slots)
            wire = Wire(settings.upstream, key, SILENCE_SECONDS, keeps_connections=not has_slots)
            async with AsyncExitStack() as closing:
                closing.push_async_callback(wire.close)
                kind = await find_kind(wire, settings.upstream_model)
                server = SERVERS[kind](wire, files, settings.upstream_model, settings.block_size)
                facts = await examined(server, renderer, may_share=has_slots)
                leases: _Leases | None = None
                lack: StoreStats | None = None
                if has_slots:
                    leased = SlotServer(wire, files, settings.upstream_model, settings.block_size)
                    try:
                        leases = await self._with_leases(leased, renderer, facts)
                        server = leased
                        facts = replace(facts, holds=True, hold_note=leases.trial.note)
                    except StoreRefused as refusal:
                        log.warning("LEASES ARE OFF", why=str(refusal), needed=FLAGS)
                        facts = replace(facts, hold_note=f"leases are off: {refusal}")
                        lack = StoreStats(is_up=False, refused=refusal.reason, problem=str(refusal))
                closing.pop_all()
            if facts.isolation == "none":
                log.warning("SCOPES ARE NOT KEPT APART by this server", why=facts.isolation_note)
            description = self._description(facts, renderer, files)
            if leases is not None:
                plan = self._disk_plan(leases.trial, facts)
                description = msgspec.structs.replace(
                    description, granularity=1, num_blocks=plan.num_blocks
                )
            workers = new_pool(renderer, self._worker, description, settings, self._days)
            images = _image_counts(server, renderer, facts)
            return _Parts(
                server,
                facts,
                renderer,
                description,
                workers,
                images,
                trial=None if leases is None else leases.trial,
                files=None if leases is None else leases.files,
                lack=lack,
            )

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

    async def _with_leases(
        self, server: SlotServer, renderer: ChatRenderer, facts: Facts
    ) -> _Leases:
        """Try whether the server keeps leases, and open the slot files.

        Raises StoreRefused if it keeps none, UpstreamGone and UpstreamBusy.
        """
        manifest = self._manifest
        if facts.kind != "llamacpp":
            raise NoLeases("no server but llama.cpp's has slot files")
        if facts.isolation == "none":
            raise NoLeases(facts.isolation_note)
        if isinstance(manifest, StoreRefused):
            raise manifest
        assert manifest is not None
        folder = manifest.path.parent
        try:
            trial = await try_leases(server, renderer, facts, folder)
        except OSError as error:
            message = f"ENGINE_UPSTREAM_SLOTS: {folder}: {error.strerror}"
            raise StoreRefused("unusable", message) from None
        if self._disk_plan(trial, facts).budget < 1:
            raise StoreRefused("too_small", "ENGINE_STORE_BYTES is too small for a slot file")
        log.info("leases are kept in the server's slot files", note=trial.note)
        return _Leases(trial, SlotFiles(manifest, trial.fingerprint))

    def _disk_plan(self, trial: SlotTrial, facts: Facts) -> DiskPlan:
        settings = self._settings
        context = facts.max_context_tokens
        return DiskPlan.of(trial.sizes, settings.store_bytes, settings.block_size, context)

    async def _watch_server(self, _stopping: asyncio.Event) -> None:
        """Watch whether the server lives and is still the same.

        Raises UpstreamError while it is away. The supervisor then calls it again, and the engine is
        not ready meanwhile.
        """
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
        """End the epoch, because the server's memory is gone. Requests fail. Final counts stay."""
        loaded = self._loaded
        self._loaded = None
        if loaded is None:
            return
        log.error("the upstream server is gone", why=reason)
        self._events.close()
        assert isinstance(loaded.loop, UpstreamLoop)
        await loaded.loop.fail_all("the upstream server is gone", "not_ready")

    async def _come_back(self, parts: _Parts) -> _Parts:
        """Begin a new epoch with a server that is back.

        Raises UpstreamError while the server is away. If another server came back, the process
        ends.
        """
        try:
            may_share = bool(self._settings.upstream_slots)
            facts = await examined(parts.server, parts.renderer, may_share=may_share)
        except UpstreamRefused as refusal:
            self._on_crash(RuntimeError(f"the upstream server came back as another one: {refusal}"))
            return parts
        is_same = _lasting(facts) == _lasting(parts.facts)
        if parts.trial is not None and parts.files is not None and is_same:
            is_same = await self._keeps_leases(parts, facts, parts.trial)
            await parts.files.flush()
        if not is_same:
            self._on_crash(RuntimeError("the upstream server came back as another one"))
            return parts
        known = replace(parts.facts, fingerprint=facts.fingerprint)
        images = _image_counts(parts.server, parts.renderer, known)
        parts = self._parts = replace(parts, facts=known, images=images)
        self._events = EventLog(epoch=uuid4().hex)
        loaded = await asyncio.to_thread(self._assemble, parts)
        self._loaded = loaded
        loaded.loop.start(self._on_crash)
        log.info("the upstream server is back", epoch=self._events.epoch)
        return parts

    async def _keeps_leases(self, parts: _Parts, facts: Facts, trial: SlotTrial) -> bool:
        """Whether the server's slot files are those that it wrote before. Raises UpstreamError."""
        assert isinstance(parts.server, SlotServer)
        folder = Path(self._settings.upstream_slots)
        try:
            again = await try_leases(parts.server, parts.renderer, facts, folder)
        except (StoreRefused, OSError) as error:
            log.error("the upstream server keeps no leases any more", why=str(error))
            return False
        return again.fingerprint == trial.fingerprint

    async def _parsers(self, loaded: Loaded, request: GenerateRequest) -> Sequence[OutputParser]:
        """Parsers for the choices. A server of chat completions parses its answers by itself."""
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
        if parts.trial is not None and parts.files is not None:
            return self._assemble_slots(parts, description, parts.trial, parts.files)
        pool = MirrorPool(description.num_blocks, description.block_size)
        entries = UnheldEntries(pool, lease_share=0.0, grace_seconds=ARRIVAL_GRACE_SECONDS)
        hasher = ChainHasher(os.urandom(32), description.block_size)
        is_isolated = parts.facts.isolation != "none"
        cache = UpstreamCache(pool, entries, hasher, is_isolated=is_isolated)
        accounting = self._accounting(cache, description)
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

    def _accounting(self, cache: UpstreamCache, description: Description) -> Accounting:
        return Accounting(
            cache,
            self._clock,
            self._events.publish,
            epoch=description.epoch,
            max_context_tokens=description.max_context_tokens,
            totals=self._totals,
        )

    def _assemble_slots(
        self, parts: _Parts, description: Description, trial: SlotTrial, files: SlotFiles
    ) -> Loaded:
        """The books and the loop for a server with slot files, with an earlier epoch's leases."""
        settings = self._settings
        plan = self._disk_plan(trial, parts.facts)
        pool = MirrorPool(plan.num_blocks, plan.block_size, tier="disk")
        hasher = ChainHasher(files.chain_key, plan.block_size)
        cache = SlotCache(pool, FileEntries(pool, plan), hasher, plan)
        now = self._clock.now()
        restored = files.restore(hasher, cache.restore_put, now, time.time())
        log.info(
            "slot files opened",
            entries=restored.num_entries,
            leases=restored.num_leases,
            lost_leases=restored.num_lost,
            misses=restored.misses,
        )
        accounting = self._accounting(cache, description)
        assert isinstance(parts.server, SlotServer)
        loop = SlotLoop(
            parts.server,
            parts.facts,
            accounting,
            cache,
            self._event_loop,
            self._supervisor,
            self._is_suspect.set,
            max_waiting=settings.max_waiting,
            files=files,
            restored=restored,
            plan=SlotPlan(
                sizes=trial.sizes, max_bytes=settings.store_bytes, may_trim=trial.may_trim
            ),
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
            # Fields that the server does not honour are not sent to it.
            default_sampling=files.sampling.within(capabilities),
            max_running=facts.max_running,
            longest_token_bytes=longest_token_bytes(renderer.tokenizer),
            identity=identity_of(settings.model, renderer, server=facts.model),
        )


def _manifest_in(folder: Path) -> StoreDirectory | StoreRefused:
    """The manifest of slot files in `folder`, or why it can't be used.

    Raises UpstreamRefused where another engine has it: the server's slots are that engine's too.
    """
    try:
        return take_directory(folder)
    except StoreRefused as refusal:
        if refusal.reason != "in_use":
            return refusal
        raise UpstreamRefused(
            f"ENGINE_UPSTREAM_SLOTS: {folder} is in use by another engine, which alone may use its "
            "server's slots"
        ) from None


def _image_counts(server: Server, renderer: ChatRenderer, facts: Facts) -> ImageCounts | None:
    return ImageCounts(server, renderer) if "images" in facts.capabilities else None


def _lasting(facts: Facts) -> tuple[Any, ...]:
    """The facts that must not change in a restart, so that our description stays true."""
    return (
        (facts.model, facts.version, facts.max_context_tokens, facts.max_running),
        (facts.block_size, facts.num_blocks),
        (facts.tells, facts.isolation, facts.capabilities),
    )
