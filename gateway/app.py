"""The composition root: the only place where the parts meet."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware

from engine.supervisor import Loop, Supervisor
from gateway.admin.openapi import describe_once
from gateway.admin.routes import CONTROLLERS
from gateway.admission.accounts import WorkspaceLimits, watch_spend
from gateway.admission.keyring import KeyRing, look_at_database
from gateway.admission.permit import Admission, EngineQueue
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
from gateway.journal.drain import Billing, Drain, Known
from gateway.journal.lost import LostTurns
from gateway.journal.rebuilt import Rebuilder
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.ledger.access import Keys, SharedLimitsTable, Workspaces
from gateway.ledger.counts import stored_turns
from gateway.ledger.database import open_ledgers
from gateway.ledger.model_ids import ModelIdsTable
from gateway.ledger.reads.prefixes import last_use
from gateway.ledger.reads.sums import Queries
from gateway.ledger.refusals import RefusalCounter, RefusalsTable
from gateway.ledger.revision import SchemaWatch
from gateway.ledger.row_ends import end_rows
from gateway.ledger.schema import KeptResponseRow
from gateway.ledger.sealed import Sealing
from gateway.ledger.stored import Batches, CachedContents, Contents
from gateway.planning.process import Planners
from gateway.prices.files import PriceBook
from gateway.prompt.ask import Ask
from gateway.routing.discovery import follow_sources
from gateway.routing.epochs import EpochRecorder
from gateway.routing.fleet import Fleet, open_fleet, weights_of
from gateway.routing.history import LoadHistory
from gateway.routing.model_ids import ModelIds
from gateway.routing.router import Router
from gateway.turn.contents import MAX_WAITING_BYTES, Keeper, KeptResponses
from gateway.turn.diagnostics import LastHolders, PrefixRecaller, PromptComparer
from gateway.turn.dispatch import Dispatcher
from gateway.turn.sweep import Sweep
from gateway.turn.tracing import BeginTrace, tracing_of
from gateway.turn.turn import TurnService

_SETTLE_SECONDS = 3.0


def create_app(
    settings: Settings, *, clock: Clock | None = None, image_hosts: ImageHosts | None = None
) -> Litestar:
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
            given = settings, clock, image_hosts, catalogue, prices, begin_trace
            try:
                app.state.services = await _start(stack, *given)
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


def _lost_turns(
    journal: Journal,
    known: Known,
    billing: Billing,
    keyring: KeyRing,
    keys: Keys,
    catalogue: Catalogue,
    fleet: Fleet,
    clock: Clock,
) -> LostTurns:
    def price_of(model: str) -> str | None:
        return catalogue.price_of(model, fleet.served)

    rebuilder = Rebuilder(keyring.scope_of, fleet.model_of, price_of, clock.wall)
    return LostTurns(journal, known, billing.charge, rebuilder, keys.workspaces, clock.monotonic)


async def _start(
    stack: AsyncExitStack,
    settings: Settings,
    clock: Clock,
    image_hosts: ImageHosts,
    catalogue: Catalogue,
    prices: PriceBook,
    begin_trace: BeginTrace,
) -> Services:
    """Start what lives as long as the gateway; it is stopped in the reverse order."""
    metrics = Metrics(settings.metrics_workspaces)
    tuning = settings.tuning

    def count_ends(kind: str, amount: int) -> None:
        metrics.count("loop_restarts", kind, amount=amount)

    supervisor = Supervisor(clock.monotonic, count_ends, has_messages=True)

    def run_beside(name: str, loop: Loop) -> None:
        """Run a loop until the gateway stops. It ends between two rounds."""
        supervisor.start(name, loop)
        stack.push_async_callback(supervisor.stop, name)

    journal = Journal(
        settings.data / "journal", settings.journal_max_bytes, supervisor.guard
    ).start()
    stack.push_async_callback(journal.stop)
    metrics.watch(
        journal_backlog=lambda: journal.backlog,
        journal_set_aside=lambda: journal.num_set_aside,
        journal_bytes=lambda: journal.num_bytes,
        journal_has_room=lambda: journal.has_room,
        journal_damaged=lambda: len(journal.damaged),
        journal_max_bytes=lambda: journal.max_bytes,
    )
    ledgers = open_ledgers(stack, settings.ledger_url)
    schema = SchemaWatch(ledgers.access)
    with suppress(LedgerUnavailable):  # it is asked again
        await schema.look()
    run_beside("schema", schema.run)
    keys = Keys(ledgers.access)
    workspaces = Workspaces(ledgers.access)
    keyring = KeyRing(keys, settings, clock)
    limits = WorkspaceLimits(clock.monotonic, clock.wall)
    shared = None  # SQLite serves one gateway
    if ledgers.access.is_postgres:
        table = SharedLimitsTable(ledgers.access)
        shared = SharedLimits(limits, table, journal.instance, clock)
        # It ends behind what closes the last turns, whose costs it tells.
        run_beside("shared_limits", shared.run)
    ids = ModelIds(ModelIdsTable(ledgers.access), clock.wall, has_default=catalogue.has_default)
    try:
        await ids.refresh()
    except GatewayError as error:
        get_logger("gateway").warning("model_ids_not_read", error=str(error))
    run_beside("model_ids", ids.run)
    fleet = await open_fleet(stack, settings, supervisor, clock.monotonic, metrics, ids)
    follow_sources(stack, settings.engines, fleet, supervisor)
    billing = Billing(prices, metrics, logged(limits.count_used, settings.access_log))
    known = ledgers.drain.known
    ending = partial(end_rows, ledgers.drain)
    insert = ledgers.drain.insert_turns
    drain = Drain(journal, insert, fleet.acknowledge, metrics, known, ending)
    lost = _lost_turns(journal, known, billing, keyring, keys, catalogue, fleet, clock)
    reconciler = Reconciler(
        journal, fleet.engines, metrics, billing.charge, clock.monotonic, known, lost
    )
    await reconciler.recover()
    run_beside("drain", drain.run)
    # The reconciler's loop has ended before this runs, and what this closes is drained after it.
    stack.push_async_callback(reconciler.finish, _SETTLE_SECONDS)
    run_beside("reconcile", reconciler.run)
    audit = Audit(journal, partial(stored_turns, ledgers.reads), clock)
    run_beside("audit", audit.run)
    run_beside("keys", keyring.run)
    run_beside("spend", partial(watch_spend, workspaces, keyring, limits, clock))
    run_beside("prices", prices.run)
    await look_at_database(keyring, keys, settings, clock)
    get_logger("gateway").info(
        "started", instance=journal.instance, recovered_turns=reconciler.num_pending
    )
    queue = EngineQueue(
        fleet.engines,
        metrics,
        clock.monotonic,
        lambda: limits.in_flight,
        wait_seconds=settings.queue_seconds,
        queue_tokens=tuning.engine_queue_tokens,
        num_rows=settings.batch_concurrency,
    )
    epochs = EpochRecorder(
        lambda: [(engine.name, engine.epochs) for engine in fleet.engines],
        ledgers.drain.record_epochs,
        clock.monotonic,
        clock.wall,
    )
    run_beside("epochs", epochs.run)
    load_history = LoadHistory(fleet.engines, lambda: queue.num_waiting, clock.wall)
    run_beside("load_history", load_history.run)
    queries = Queries(ledgers.reads)

    def most_cost(ask: Ask) -> int:
        return billing.most(ask, clock.wall().date())

    background = Background()
    stack.push_async_callback(background.close, _SETTLE_SECONDS)
    keeper = Keeper(
        Contents(ledgers.store, settings.master_secret),
        journal,
        background,
        clock,
        most_waiting_bytes=min(MAX_WAITING_BYTES, settings.journal_max_bytes // 4),
    )
    await keeper.start()
    run_beside("contents", keeper.run)
    run_beside("kept_contents", keeper.drain)
    days = tuning.response_days if tuning.keep_responses else None
    kept = Contents(ledgers.store, settings.master_secret, KeptResponseRow, days)
    responses = KeptResponses(
        kept, clock, keeps_all=days is not None, most_bytes=tuning.response_bytes
    )
    run_beside("responses", responses.run)
    turns = TurnService(
        dispatcher=Dispatcher(
            fleet=fleet,
            catalogue=catalogue,
            queue=queue,
            router=Router(weights_of(settings)),
            journal=journal,
            reconciler=reconciler,
            metrics=metrics,
            clock=clock,
        ),
        journal=journal,
        reconciler=reconciler,
        admission=Admission(limits, queue, most_cost, shared),
        billing=billing,
        metrics=metrics,
        background=background,
        diagnostics=PromptComparer(queries.fingerprint, background),
        residency=LastHolders(fleet.epoch_of),
        recaller=PrefixRecaller(partial(last_use, queries.ledger), background),
        keeper=keeper,
        clock=clock,
        begin_trace=begin_trace,
    )
    workers = Workers()
    stack.callback(workers.close)
    contents = CachedContents(
        ledgers.store, settings.master_secret, tuning.cached_contents, tuning.cached_content_bytes
    )
    sealing = Sealing(ledgers.store, settings.master_secret)
    run_beside("sealing", sealing.run)
    conditions = Conditions(
        fleet, journal, drain, ledgers.drain.identity, audit, lost, sealing, supervisor, clock
    )
    run_beside("conditions", conditions.run)
    sweep = Sweep(contents, fleet, keyring, catalogue, clock)
    run_beside("cached_contents", sweep.run)
    refusals = RefusalCounter(RefusalsTable(ledgers.drain), clock)
    run_beside("refusals", refusals.run)
    reads = read_limits()
    services = Services(
        turns=turns,
        fleet=fleet,
        load_history=load_history,
        catalogue=catalogue,
        keyring=keyring,
        admin=AdminGate(keyring, settings.admin_key),
        keys=keys,
        workspaces=workspaces,
        queries=queries,
        prices=prices,
        journal=journal,
        conditions=conditions,
        metrics=metrics,
        supervisor=supervisor,
        ledger=ledgers.drain.identity,
        reads=reads,
        planners=Planners(reads["planner"].taken),
        clock=clock,
        workers=workers,
        shared_limits=shared,
        counting=Counting(tuning, clock.monotonic),
        bounds=tuning,
        cached_contents=contents,
        sealing=sealing,
        sweep=sweep,
        batches=Batches(
            ledgers.store,
            settings.master_secret,
            most_running=tuning.batches,
            most_bytes=tuning.batch_bytes,
        ),
        removes_nonces=settings.remove_nonces,
        unreadable=settings.unreadable,
        auto_cache_messages=settings.auto_cache_messages,
        responses=responses,
        image_hosts=image_hosts,
        refusals=refusals,
        refused=RefusalsTable(ledgers.reads),
    )
    run_beside("batches", BatchRunner(services, settings.batch_concurrency).run)
    return services
