"""The composition root: the only place where the parts meet."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware

from engine.traces import Traces, open_traces
from gateway.admin.openapi import describe_once
from gateway.admin.routes import CONTROLLERS
from gateway.admission.accounts import SpendWatch, WorkspaceLimits
from gateway.admission.bodies import BodyBytes
from gateway.admission.counting import Counting
from gateway.admission.keyring import KeyRing, look_at_database, make_keyring
from gateway.admission.large_bodies import LargeBodies
from gateway.admission.permit import Admission, RowAdmission
from gateway.admission.queue import EngineQueue
from gateway.admission.reading import read_limits
from gateway.admission.shared import SharedLimits
from gateway.admission.workers import Workers
from gateway.base.background import Background
from gateway.base.catalogue import Catalogue, load_catalogue
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.settings import Settings
from gateway.base.supervisor import CountEnd, Loop, Supervisor
from gateway.http import errors
from gateway.http.access_log import logged
from gateway.http.auth import AdminGate
from gateway.http.batch_runner import make_runner
from gateway.http.bodies import BodyDeadline
from gateway.http.errors import Refusals
from gateway.http.services import Services
from gateway.journal.charge import Billing
from gateway.journal.drain import Drain
from gateway.journal.reconcile import Reconciler
from gateway.journal.store import Journal
from gateway.ledger.access import Keys, Workspaces
from gateway.ledger.database import Ledger, open_ledgers
from gateway.ledger.reads.sums import Queries
from gateway.ledger.shared_limits import SharedLimitsTable
from gateway.ledger.stored import CachedContents
from gateway.planning.process import Planners
from gateway.prices.book import PriceBook
from gateway.prompt.ask import Ask
from gateway.routing.fleet import Fleet, open_fleet, weights_of
from gateway.routing.router import Router
from gateway.turn.diagnostics import PromptComparer
from gateway.turn.dispatch import Dispatcher
from gateway.turn.sweep import Sweep
from gateway.turn.tracing import tracing_of
from gateway.turn.turn import TurnService
from gateway.turn.why_missed import LastHolders

_SETTLE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Foundation:
    """What the parts are built on."""

    metrics: Metrics
    supervisor: Supervisor
    clock: Clock
    traces: Traces | None


def create_app(
    settings: Settings,
    *,
    clock: Clock | None = None,
    make_supervisor: Callable[[Callable[[], float], CountEnd], Supervisor] = Supervisor,
) -> Litestar:
    """`make_supervisor` is how tests put faults into loops."""
    clock = clock or Clock()
    catalogue = load_catalogue(settings.models, claude_alias=settings.claude_alias)
    prices = PriceBook(settings.prices, settings.hosted_prices)
    traces = open_traces("holdfast-gateway") if settings.traces else None

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            metrics = Metrics(settings.metrics_workspaces)
            supervisor = make_supervisor(clock.monotonic, metrics.count_loop_end)
            if traces is not None:
                stack.push_async_callback(traces.aclose)
                metrics.watch_spans(traces.count)
            base = Foundation(metrics, supervisor, clock, traces)
            try:
                app.state.services = await _start(stack, settings, base, catalogue, prices)
            except GatewayError as error:
                app.state.start_failure = str(error)
                raise
            yield

    app = Litestar(
        list(CONTROLLERS),
        lifespan=[lifespan],
        dependencies={"services": Provide(_services, sync_to_thread=False)},
        state=State({"stopping": asyncio.Event(), "refusals": Refusals()}),
        middleware=[
            DefineMiddleware(
                BodyDeadline,
                request_seconds=settings.tuning.request_seconds,
                bodies=BodyBytes(settings.tuning.bodies_bytes),
                large=LargeBodies(settings.tuning.large_body_bytes_per_minute, time.monotonic),
            ),
        ],
        exception_handlers=errors.handlers,
        before_send=[errors.before_send],
        after_exception=[errors.after_exception],
        request_max_body_size=settings.body_limit_bytes,
        openapi_config=None,
        logging_config=None,
    )
    describe_once(app)
    return app


def _services(state: State) -> Services:
    services: Services = state.services
    return services


async def _start(
    stack: AsyncExitStack,
    settings: Settings,
    base: Foundation,
    catalogue: Catalogue,
    prices: PriceBook,
) -> Services:
    """Start what lives as long as the gateway; it is stopped in the reverse order."""
    metrics, clock = base.metrics, base.clock
    journal = _open_journal(stack, settings, base)
    ledgers = open_ledgers(stack, settings.ledger_url)
    keys, workspaces = Keys(ledgers.access), Workspaces(ledgers.access)
    keyring = make_keyring(keys, settings, clock)
    limits = WorkspaceLimits(clock.monotonic, clock.wall)
    spend = SpendWatch(workspaces, lambda: keyring.workspaces, limits, clock)
    shared = _shared_limits(ledgers.access, limits, journal.instance, clock)
    fleet = await open_fleet(stack, settings, base.supervisor, clock.monotonic)
    billing = Billing(prices, metrics, logged(limits.count_used, settings.access_log))
    reconciler, drain = await _settlers(journal, ledgers.drain, fleet, base, billing)
    _run_loops(stack, base.supervisor, drain, reconciler, keyring, spend, prices)
    sweep = _sweep(settings, ledgers.store, fleet, keyring, catalogue, clock)
    await look_at_database(keyring, keys, settings, clock)
    get_logger("gateway").info(
        "started", instance=journal.instance, recovered_turns=len(reconciler.pending)
    )
    queue = EngineQueue(
        fleet.engines,
        metrics,
        clock.monotonic,
        lambda: limits.in_flight,
        wait_seconds=settings.queue_seconds,
        queue_tokens=settings.tuning.engine_queue_tokens,
        num_rows=settings.batch_concurrency,
    )
    dispatcher = Dispatcher(
        fleet=fleet,
        queue=queue,
        router=Router(weights_of(settings)),
        journal=journal,
        reconciler=reconciler,
        metrics=metrics,
        clock=clock,
    )
    queries = Queries(ledgers.reads)

    def most_cost(ask: Ask) -> int:
        return billing.most(ask, clock.wall().date())

    background = _background(stack)
    turns = TurnService(
        dispatcher=dispatcher,
        journal=journal,
        reconciler=reconciler,
        admission=Admission(limits, queue, most_cost, shared),
        billing=billing,
        metrics=metrics,
        background=background,
        diagnostics=PromptComparer(queries.fingerprint, background),
        residency=LastHolders(fleet.epoch_of),
        clock=clock,
        begin_trace=tracing_of(base.traces, clock.monotonic),
    )
    rows = replace(turns, admission=RowAdmission(limits, queue, most_cost, shared))
    if shared is not None:
        _run_beside(stack, base.supervisor, "shared_limits", shared.run)
    runner = make_runner(settings, ledgers.store, rows, keyring, _workers(stack), catalogue)
    _run_beside(stack, base.supervisor, "cached_contents", sweep.run)
    _run_beside(stack, base.supervisor, "batches", runner.run)
    reads = read_limits()
    return Services(
        turns=turns,
        fleet=fleet,
        catalogue=catalogue,
        keyring=keyring,
        admin=AdminGate(keyring, settings.admin_key),
        keys=keys,
        workspaces=workspaces,
        queries=queries,
        prices=prices,
        journal=journal,
        metrics=metrics,
        supervisor=base.supervisor,
        ledger=ledgers.drain.identity,
        reads=reads,
        planners=Planners(reads["planner"]),
        clock=clock,
        workers=runner.workers,
        shared_limits=shared,
        counting=Counting(settings.tuning, clock.monotonic),
        bounds=settings.tuning,
        cached_contents=sweep.contents,
        sweep=sweep,
        batches=runner.store,
        row_reader=runner.reader,
        removes_nonces=settings.remove_nonces,
        unreadable=settings.unreadable,
        auto_cache_messages=settings.auto_cache_messages,
    )


def _shared_limits(
    ledger: Ledger, limits: WorkspaceLimits, instance: str, clock: Clock
) -> SharedLimits | None:
    """None with SQLite, which serves one gateway."""
    if not ledger.is_postgres:
        return None
    return SharedLimits(limits, SharedLimitsTable(ledger), instance, clock)


def _sweep(
    settings: Settings,
    ledger: Ledger,
    fleet: Fleet,
    keyring: KeyRing,
    catalogue: Catalogue,
    clock: Clock,
) -> Sweep:
    tuning = settings.tuning
    contents = CachedContents(ledger, tuning.cached_contents, tuning.cached_content_bytes)
    return Sweep(contents, fleet, keyring, catalogue, clock)


async def _settlers(
    journal: Journal,
    ledger: Ledger,
    fleet: Fleet,
    base: Foundation,
    billing: Billing,
) -> tuple[Reconciler, Drain]:
    """What closes turns, with those that the journal has open, and what drains them."""
    metrics, known, monotonic = base.metrics, ledger.known, base.clock.monotonic
    drain = Drain(journal, ledger.insert_turns, fleet.acknowledge, metrics, known)
    reconciler = Reconciler(journal, fleet.engines, metrics, billing.charge, monotonic, known)
    await reconciler.recover()
    return reconciler, drain


def _workers(stack: AsyncExitStack) -> Workers:
    workers = Workers()
    stack.callback(workers.close)
    return workers


def _open_journal(stack: AsyncExitStack, settings: Settings, base: Foundation) -> Journal:
    directory = settings.data / "journal"
    journal = Journal(directory, settings.journal_max_bytes, base.supervisor.guard).start()
    stack.push_async_callback(journal.stop)
    base.metrics.watch(
        journal_backlog=lambda: journal.backlog,
        journal_set_aside=lambda: journal.num_set_aside,
        journal_bytes=lambda: journal.num_bytes,
        journal_has_room=lambda: journal.has_room,
        journal_damaged=lambda: len(journal.damaged),
        journal_max_bytes=lambda: journal.max_bytes,
    )
    return journal


def _run_loops(
    stack: AsyncExitStack,
    supervisor: Supervisor,
    drain: Drain,
    reconciler: Reconciler,
    keyring: KeyRing,
    spend: SpendWatch,
    prices: PriceBook,
) -> None:
    _run_beside(stack, supervisor, "drain", drain.run)
    # The reconciler's loop has ended before this runs, and what this closes is drained after it.
    stack.push_async_callback(reconciler.finish, _SETTLE_SECONDS)
    _run_beside(stack, supervisor, "reconcile", reconciler.run)
    _run_beside(stack, supervisor, "keys", keyring.run)
    _run_beside(stack, supervisor, "spend", spend.run)
    _run_beside(stack, supervisor, "prices", prices.run)


def _background(stack: AsyncExitStack) -> Background:
    background = Background()
    stack.push_async_callback(background.close, _SETTLE_SECONDS)
    return background


def _run_beside(stack: AsyncExitStack, supervisor: Supervisor, name: str, loop: Loop) -> None:
    """Run a loop until the gateway stops. It ends between two rounds."""
    supervisor.start(name, loop)
    stack.push_async_callback(supervisor.stop, name)
