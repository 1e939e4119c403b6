"""The composition root: the only place where all parts meet."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware

from engine.supervisor import Loop, Supervisor
from gateway.admin.openapi import describe_once
from gateway.admin.routes import CONTROLLERS
from gateway.admission.accounts import WorkspaceLimits, watch_spend
from gateway.admission.engine_queue import EngineQueue
from gateway.admission.keyring import KeyRing, look_at_database
from gateway.admission.permit import Admission
from gateway.admission.rates import BodyBytes, Counting, LargeBodies, read_limits
from gateway.admission.shared import SharedLimits
from gateway.admission.workers import Workers
from gateway.base.background import Background
from gateway.base.catalogue import Catalogue, load_catalogue
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, LedgerUnavailable
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.settings import Settings
from gateway.base.traces import open_traces
from gateway.conditions.leases import LeaseEnds
from gateway.conditions.watch import Conditions
from gateway.http import errors
from gateway.http.auth import AdminGate
from gateway.http.batch_runner import BatchRunner
from gateway.http.bodies import BodyBounds, BodyDeadline, BoundedRequest
from gateway.http.image_hosts import ImageHosts
from gateway.http.refusals import Refusals
from gateway.http.server import logged
from gateway.http.services import Services
from gateway.journal.audit import Audit
from gateway.journal.drain import Billing, Drain
from gateway.journal.lost import LostTurns
from gateway.journal.rebuilt import Rebuilder
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.ledger.access import Keys, SharedLimitsTable, Workspaces
from gateway.ledger.batches import Batches
from gateway.ledger.cached_contents import CachedContents
from gateway.ledger.contents import Contents
from gateway.ledger.counts import stored_turns
from gateway.ledger.database import Ledgers, open_ledgers
from gateway.ledger.model_ids import ModelIdsTable
from gateway.ledger.pending_purges import PendingPurgesTable
from gateway.ledger.reads.leases import LeaseFates, lease_fates
from gateway.ledger.reads.prefixes import last_use
from gateway.ledger.reads.sums import Queries, Range
from gateway.ledger.refusals import RefusalCounter, RefusalsTable
from gateway.ledger.revision import SchemaWatch
from gateway.ledger.row_ends import end_rows
from gateway.ledger.schema import KeptResponseRow
from gateway.ledger.sealed import Sealing
from gateway.planning.process import Planners
from gateway.prices.files import PriceBook
from gateway.prompt.ask import Ask
from gateway.routing.discovery import follow_sources
from gateway.routing.epochs import EpochRecorder
from gateway.routing.fleet import Fleet, open_fleet, weights_of
from gateway.routing.history import LoadHistory
from gateway.routing.model_ids import ModelIds
from gateway.routing.pending_purges import PendingPurges
from gateway.routing.router import Router
from gateway.turn.contents import MAX_WAITING_BYTES, ContentWriter, StoredResponses
from gateway.turn.diagnostics import LastHolders, PrefixRecaller, PromptComparer
from gateway.turn.dispatch import Dispatcher
from gateway.turn.sweep import Sweep
from gateway.turn.tracing import BeginTrace, tracing_of
from gateway.turn.turn import TurnService

_SETTLE_SECONDS = 3.0


def create_app(
    settings: Settings, *, clock: Clock | None = None, image_hosts: ImageHosts | None = None
) -> Litestar:
    """The gateway's application. `clock` and `image_hosts` replace the real ones in tests. If the
    start fails with a GatewayError, the state keeps its message as `start_failure`."""
    clock = clock or Clock()
    image_hosts = image_hosts or ImageHosts(settings.tuning.image_hosts)
    catalogue = load_catalogue(settings.models, claude_alias=settings.claude_alias)
    prices = PriceBook(settings.prices, settings.hosted_prices)
    traces = open_traces("holdfast-gateway") if settings.traces else None

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if traces is not None:
                stack.push_async_callback(traces.aclose)
            begin_trace = tracing_of(traces, clock.monotonic)
            base = _base(stack, settings, clock, catalogue, prices)
            try:
                app.state.services = await _start(base, image_hosts, begin_trace)
            except GatewayError as error:
                app.state.start_failure = str(error)
                raise
            yield

    tuning = settings.tuning
    body_bounds = BodyBounds(
        settings.body_limit_bytes,
        tuning.request_seconds,
        BodyBytes(tuning.bodies_bytes),
        LargeBodies(tuning.large_body_bytes_per_minute, time.monotonic),
    )
    app = Litestar(
        list(CONTROLLERS),
        lifespan=[lifespan],
        dependencies={"services": Provide(_services, sync_to_thread=False)},
        state=State({"stopping": asyncio.Event(), "refusals": Refusals()}),
        middleware=[DefineMiddleware(BodyDeadline, bounds=body_bounds)],
        exception_handlers=errors.handlers,
        before_send=[errors.before_send],
        after_exception=[errors.after_exception],
        request_class=BoundedRequest,
        openapi_config=None,
        logging_config=None,
    )
    describe_once(app)
    return app


def _services(state: State) -> Services:
    services: Services = state.services
    return services


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """What all other parts need for their start."""

    stack: AsyncExitStack
    settings: Settings
    clock: Clock
    metrics: Metrics
    supervisor: Supervisor
    catalogue: Catalogue
    prices: PriceBook

    def run_beside(self, name: str, loop: Loop) -> None:
        """Run a loop until the gateway stops. It ends between two rounds."""
        self.supervisor.start(name, loop)
        self.stack.push_async_callback(self.supervisor.stop, name)


def _base(
    stack: AsyncExitStack,
    settings: Settings,
    clock: Clock,
    catalogue: Catalogue,
    prices: PriceBook,
) -> _Base:
    metrics = Metrics(settings.metrics_workspaces, as_vllm=settings.vllm_metrics)

    def count_ends(kind: str, amount: int) -> None:
        metrics.count("loop_restarts", kind, amount=amount)

    return _Base(
        stack=stack,
        settings=settings,
        clock=clock,
        metrics=metrics,
        supervisor=Supervisor(clock.monotonic, count_ends, has_messages=True),
        catalogue=catalogue,
        prices=prices,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stores:
    """The database, and the parts that keep some of it in memory."""

    ledgers: Ledgers
    keys: Keys
    workspaces: Workspaces
    keyring: KeyRing
    limits: WorkspaceLimits
    shared: SharedLimits | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Books:
    """The parts that bring a turn's record to its end and into the database."""

    journal: Journal
    billing: Billing
    drain: Drain
    reconciler: Reconciler
    audit: Audit
    lost: LostTurns


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredTexts:
    """The stores of clients' texts that are read again later."""

    content_writer: ContentWriter
    responses: StoredResponses
    cached_contents: CachedContents


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """The parts that handlers use, besides the stores."""

    turns: TurnService
    fleet: Fleet
    load_history: LoadHistory
    journal: Journal
    conditions: Conditions
    workers: Workers
    sealing: Sealing
    sweep: Sweep
    refusals: RefusalCounter


async def _start(base: _Base, image_hosts: ImageHosts, begin_trace: BeginTrace) -> Services:
    """Start all parts that live as long as the gateway. They are stopped in the reverse order."""
    journal = _start_journal(base)
    stores = await _open_stores(base, journal)
    fleet = await _open_fleet(base, stores)
    books = await _open_books(base, stores, journal, fleet)
    await _watch_access(base, stores)
    get_logger("gateway").info(
        "started", instance=journal.instance, recovered_turns=books.reconciler.num_pending
    )
    queue = _open_queue(base, stores, fleet)
    load_history = _record_engines(base, stores, fleet, queue)
    background = Background()
    base.stack.push_async_callback(background.close, _SETTLE_SECONDS)
    texts = await _keep_contents(base, stores, journal, background)
    turns = _turn_service(
        base, stores, fleet, books, queue, texts.content_writer, background, begin_trace
    )
    workers = Workers()
    base.stack.callback(workers.close)
    sealing = Sealing(stores.ledgers.store, base.settings.master_secret)
    base.run_beside("sealing", sealing.run)
    conditions = _watch_conditions(base, stores, fleet, books, sealing)
    sweep = Sweep(texts.cached_contents, fleet, stores.keyring, base.catalogue, base.clock)
    base.run_beside("cached_contents", sweep.run)
    refusals = RefusalCounter(RefusalsTable(stores.ledgers.drain), base.clock)
    base.run_beside("refusals", refusals.run)
    running = _Running(
        turns=turns,
        fleet=fleet,
        load_history=load_history,
        journal=journal,
        conditions=conditions,
        workers=workers,
        sealing=sealing,
        sweep=sweep,
        refusals=refusals,
    )
    services = _services_of(base, stores, texts, running, image_hosts)
    base.run_beside("batches", BatchRunner(services, base.settings.batch_concurrency).run)
    return services


def _start_journal(base: _Base) -> Journal:
    settings = base.settings
    folder = settings.data / "journal"
    journal = Journal(folder, settings.journal_max_bytes, base.supervisor.guard).start()
    base.stack.push_async_callback(journal.stop)
    base.metrics.watch(
        journal_backlog=lambda: journal.backlog,
        journal_set_aside=lambda: journal.num_set_aside,
        journal_bytes=lambda: journal.num_bytes,
        journal_has_room=lambda: journal.has_room,
        journal_damaged=lambda: len(journal.damaged),
        journal_max_bytes=lambda: journal.max_bytes,
    )
    return journal


async def _open_stores(base: _Base, journal: Journal) -> _Stores:
    ledgers = open_ledgers(base.stack, base.settings.ledger_url)
    schema = SchemaWatch(ledgers.access)
    with suppress(LedgerUnavailable):  # the loop below asks again
        await schema.look()
    base.run_beside("schema", schema.run)
    keys = Keys(ledgers.access)
    limits = WorkspaceLimits(base.clock.monotonic, base.clock.wall)
    shared = None  # SQLite serves one gateway
    if ledgers.access.is_postgres:
        table = SharedLimitsTable(ledgers.access)
        shared = SharedLimits(limits, table, journal.instance, base.clock)
        # It stops after the loops that close the last turns, since it reports their costs.
        base.run_beside("shared_limits", shared.run)
    return _Stores(
        ledgers=ledgers,
        keys=keys,
        workspaces=Workspaces(ledgers.access),
        keyring=KeyRing(keys, base.settings, base.clock),
        limits=limits,
        shared=shared,
    )


async def _open_fleet(base: _Base, stores: _Stores) -> Fleet:
    clock = base.clock
    table = ModelIdsTable(stores.ledgers.access)
    ids = ModelIds(table, clock.wall, has_default=base.catalogue.has_default)
    try:
        await ids.refresh()
    except GatewayError as error:
        get_logger("gateway").warning("model_ids_not_read", error=str(error))
    base.run_beside("model_ids", ids.run)
    purges = PendingPurges(PendingPurgesTable(stores.ledgers.access))
    await purges.look()
    base.run_beside("pending_purges", purges.run)
    settings = base.settings
    supervisor = base.supervisor
    fleet = await open_fleet(
        base.stack, settings, supervisor, clock.monotonic, base.metrics, ids, purges
    )
    follow_sources(base.stack, settings.engines, fleet, supervisor)
    return fleet


async def _open_books(base: _Base, stores: _Stores, journal: Journal, fleet: Fleet) -> _Books:
    metrics = base.metrics
    ledger = stores.ledgers.drain
    count_used = logged(stores.limits.count_used, base.settings.access_log)
    billing = Billing(base.prices, metrics, count_used)
    ending = partial(end_rows, ledger)
    drain = Drain(journal, ledger.insert_turns, fleet.acknowledge, metrics, ledger.known, ending)
    lost = _lost_turns(base, stores, journal, fleet, billing)
    monotonic = base.clock.monotonic
    reconciler = Reconciler(
        journal, fleet.engines, metrics, billing.charge, monotonic, ledger.known, lost
    )
    await reconciler.recover()
    base.run_beside("drain", drain.run)
    # `finish` runs after the reconciler's loop has ended and before the drain ends, so the turns
    # that it closes are drained.
    base.stack.push_async_callback(reconciler.finish, _SETTLE_SECONDS)
    base.run_beside("reconcile", reconciler.run)
    audit = Audit(journal, partial(stored_turns, stores.ledgers.reads), base.clock)
    base.run_beside("audit", audit.run)
    return _Books(
        journal=journal,
        billing=billing,
        drain=drain,
        reconciler=reconciler,
        audit=audit,
        lost=lost,
    )


def _lost_turns(
    base: _Base, stores: _Stores, journal: Journal, fleet: Fleet, billing: Billing
) -> LostTurns:
    """The part that makes records of turns that only engines know."""
    clock = base.clock

    def price_of(model: str) -> str | None:
        return base.catalogue.price_of(model, fleet.served)

    rebuilder = Rebuilder(stores.keyring.scope_of, fleet.model_of, price_of, clock.wall)
    return LostTurns(
        journal,
        stores.ledgers.drain.known,
        billing.charge,
        rebuilder,
        stores.keys.workspaces,
        clock.monotonic,
    )


async def _watch_access(base: _Base, stores: _Stores) -> None:
    """Follow the keys, the spending of workspaces, and the prices. Look at the database once before
    the first request."""
    keyring = stores.keyring
    clock = base.clock
    base.run_beside("keys", keyring.run)
    base.run_beside("spend", partial(watch_spend, stores.workspaces, keyring, stores.limits, clock))
    base.run_beside("prices", base.prices.run)
    await look_at_database(keyring, stores.keys, base.settings, clock)


def _open_queue(base: _Base, stores: _Stores, fleet: Fleet) -> EngineQueue:
    return EngineQueue(
        fleet.engines,
        base.metrics,
        base.clock.monotonic,
        lambda: stores.limits.in_flight,
        wait_seconds=base.settings.queue_seconds,
        queue_tokens=base.settings.tuning.engine_queue_tokens,
        num_rows=base.settings.batch_concurrency,
    )


def _record_engines(base: _Base, stores: _Stores, fleet: Fleet, queue: EngineQueue) -> LoadHistory:
    """Record the engines' epochs in the database, and their load in memory."""
    epochs = EpochRecorder(
        lambda: [(engine.name, engine.epochs) for engine in fleet.engines],
        stores.ledgers.drain.record_epochs,
        base.clock.monotonic,
        base.clock.wall,
    )
    base.run_beside("epochs", epochs.run)
    load_history = LoadHistory(fleet.engines, lambda: queue.num_waiting, base.clock.wall)
    base.run_beside("load_history", load_history.run)
    return load_history


async def _keep_contents(
    base: _Base, stores: _Stores, journal: Journal, background: Background
) -> _StoredTexts:
    clock = base.clock
    secret = base.settings.master_secret
    tuning = base.settings.tuning
    days = base.settings.response_days or None
    store = stores.ledgers.store
    content_writer = ContentWriter(
        Contents(store, secret),
        journal,
        background,
        clock,
        most_waiting_bytes=min(MAX_WAITING_BYTES, base.settings.journal_max_bytes // 4),
    )
    await content_writer.start()
    base.run_beside("contents", content_writer.run)
    base.run_beside("kept_contents", content_writer.drain)
    responses = StoredResponses(
        Contents(store, secret, KeptResponseRow, days),
        clock,
        keeps_all=days is not None,
        most_bytes=tuning.response_bytes,
    )
    base.run_beside("responses", responses.run)
    cached_contents = CachedContents(
        store, secret, tuning.cached_contents, tuning.cached_content_bytes
    )
    return _StoredTexts(
        content_writer=content_writer, responses=responses, cached_contents=cached_contents
    )


def _turn_service(
    base: _Base,
    stores: _Stores,
    fleet: Fleet,
    books: _Books,
    queue: EngineQueue,
    content_writer: ContentWriter,
    background: Background,
    begin_trace: BeginTrace,
) -> TurnService:
    clock = base.clock
    metrics = base.metrics
    queries = Queries(stores.ledgers.reads)

    def most_cost(ask: Ask) -> int:
        return books.billing.most(ask, clock.wall().date())

    return TurnService(
        dispatcher=Dispatcher(
            fleet=fleet,
            catalogue=base.catalogue,
            queue=queue,
            router=Router(weights_of(base.settings)),
            journal=books.journal,
            reconciler=books.reconciler,
            metrics=metrics,
            clock=clock,
        ),
        journal=books.journal,
        reconciler=books.reconciler,
        admission=Admission(stores.limits, queue, most_cost, stores.shared),
        billing=books.billing,
        metrics=metrics,
        background=background,
        diagnostics=PromptComparer(queries.fingerprint, background),
        last_holders=LastHolders(fleet.epoch_of),
        recaller=PrefixRecaller(partial(last_use, queries.ledger), background),
        content_writer=content_writer,
        clock=clock,
        begin_trace=begin_trace,
    )


def _watch_conditions(
    base: _Base, stores: _Stores, fleet: Fleet, books: _Books, sealing: Sealing
) -> Conditions:
    reads = stores.ledgers.reads

    async def fates_of(of: Range) -> Mapping[str, LeaseFates]:
        return await lease_fates(reads, of, fleet.answering)

    lease_ends = LeaseEnds(fates_of, base.metrics, base.clock)
    base.run_beside("lease_ends", lease_ends.run)
    conditions = Conditions(
        fleet,
        books.journal,
        books.drain,
        stores.ledgers.drain.identity,
        books.audit,
        books.lost,
        sealing,
        lease_ends,
        base.supervisor,
        base.clock,
    )
    base.run_beside("conditions", conditions.run)
    return conditions


def _services_of(
    base: _Base, stores: _Stores, texts: _StoredTexts, running: _Running, image_hosts: ImageHosts
) -> Services:
    """The parts that handlers may use."""
    settings = base.settings
    tuning = settings.tuning
    ledgers = stores.ledgers
    reads = read_limits()
    return Services(
        turns=running.turns,
        fleet=running.fleet,
        load_history=running.load_history,
        catalogue=base.catalogue,
        keyring=stores.keyring,
        admin=AdminGate(stores.keyring, settings.admin_key),
        keys=stores.keys,
        workspaces=stores.workspaces,
        queries=Queries(ledgers.reads),
        prices=base.prices,
        journal=running.journal,
        conditions=running.conditions,
        metrics=base.metrics,
        supervisor=base.supervisor,
        ledger=ledgers.drain.identity,
        reads=reads,
        planners=Planners(reads["planner"].taken),
        clock=base.clock,
        workers=running.workers,
        shared_limits=stores.shared,
        counting=Counting(tuning, base.clock.monotonic),
        bounds=tuning,
        cached_contents=texts.cached_contents,
        sealing=running.sealing,
        sweep=running.sweep,
        batches=Batches(
            ledgers.store,
            settings.master_secret,
            max_running=tuning.batches,
            max_bytes=tuning.batch_bytes,
        ),
        removes_nonces=settings.remove_nonces,
        unreadable=settings.unreadable,
        auto_cache_messages=settings.auto_cache_messages,
        responses=texts.responses,
        image_hosts=image_hosts,
        refusals=running.refusals,
        refused=RefusalsTable(ledgers.reads),
    )
