"""The composition root: the only place where the parts meet."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from litestar import Litestar
from litestar.datastructures import State
from litestar.di import Provide
from litestar.middleware import DefineMiddleware

from gateway.admin.about import AboutController
from gateway.admin.divergence import DivergenceController
from gateway.admin.engines import EnginesController
from gateway.admin.keys import KeysController
from gateway.admin.leases import LeasesController
from gateway.admin.live import LiveController
from gateway.admin.openapi import OpenApiController
from gateway.admin.overview import AdminController
from gateway.admin.report import ReportController
from gateway.admin.usage import UsageController
from gateway.admin.workspaces import WorkspacesController
from gateway.base.background import Background
from gateway.base.catalogue import Catalogue, load_catalogue
from gateway.base.clock import Clock
from gateway.base.errors import LedgerUnavailable
from gateway.base.logs import get_logger
from gateway.base.metrics import Metrics
from gateway.base.settings import Settings
from gateway.http import errors
from gateway.http.auth import AdminGate
from gateway.http.completions import ChatCompletionsController, CompletionsController
from gateway.http.connections import BodyDeadline
from gateway.http.health import HealthController
from gateway.http.messages import MessagesController
from gateway.http.models import ModelsController
from gateway.http.services import Services
from gateway.journal.charge import Billing
from gateway.journal.drain import Drain
from gateway.journal.reconcile import Reconciler
from gateway.journal.writer import Journal
from gateway.ledger.database import Ledger
from gateway.ledger.keys import Keys
from gateway.ledger.reads.totals import Queries
from gateway.ledger.workspaces import DEFAULT_WORKSPACE, Workspaces
from gateway.limits.admission import Admission
from gateway.limits.keyring import KeyRing
from gateway.limits.spend import SpendWatch
from gateway.prices.pricing import PriceBook
from gateway.routing.client import EngineHttp
from gateway.routing.cost import Weights
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.router import Router
from gateway.turn.diagnostics import PromptComparer
from gateway.turn.dispatch import Dispatcher
from gateway.turn.gate import Gate
from gateway.turn.ids import Ids
from gateway.turn.turn import TurnService
from gateway.turn.why_missed import LastHolders

_SETTLE_SECONDS = 3.0
_STOP_SECONDS = 6.0

Loop = Callable[[asyncio.Event], Coroutine[Any, Any, None]]


def create_app(settings: Settings, *, clock: Clock | None = None) -> Litestar:
    clock = clock or Clock()
    catalogue = load_catalogue(settings.models, claude_alias=settings.claude_alias)
    prices = PriceBook(settings.prices, settings.hosted_prices)

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.services = await _start(stack, settings, clock, catalogue, prices)
            yield

    return Litestar(
        [
            MessagesController,
            ChatCompletionsController,
            CompletionsController,
            ModelsController,
            HealthController,
            AdminController,
            AboutController,
            DivergenceController,
            EnginesController,
            LiveController,
            LeasesController,
            WorkspacesController,
            KeysController,
            UsageController,
            ReportController,
            OpenApiController,
        ],
        lifespan=[lifespan],
        dependencies={"services": Provide(_services, sync_to_thread=False)},
        state=State({"stopping": asyncio.Event(), "ids": Ids()}),
        middleware=[DefineMiddleware(BodyDeadline, request_seconds=settings.request_seconds)],
        exception_handlers=errors.handlers,
        before_send=[errors.before_send],
        after_exception=[errors.after_exception],
        request_max_body_size=settings.body_limit_bytes,
        openapi_config=None,
        logging_config=None,
    )


def _services(state: State) -> Services:
    services: Services = state.services
    return services


async def _start(
    stack: AsyncExitStack,
    settings: Settings,
    clock: Clock,
    catalogue: Catalogue,
    prices: PriceBook,
) -> Services:
    """Start what lives as long as the gateway; it is stopped in the reverse order."""
    metrics = Metrics()
    journal = _open_journal(stack, settings, metrics)
    ledger = _open_ledger(stack, settings)
    keys = Keys(ledger)
    workspaces = Workspaces(ledger)
    keyring = KeyRing(
        keys, settings.master_secret, clock, settings.api_key, settings.keys_stale_seconds
    )
    admission = Admission(clock.monotonic, clock.wall)
    spend = SpendWatch(workspaces, lambda: keyring.workspaces, admission, clock)
    router = Router(_weights(settings))
    fleet = await _start_fleet(stack, settings, router.weights, clock)
    billing = Billing(prices, metrics, admission.count_used)
    reconciler = Reconciler(journal, fleet.engines, metrics, billing.charge, clock.monotonic)
    recovered = await reconciler.recover()
    drain = Drain(journal, ledger.insert_turns, fleet.acknowledge, metrics)
    background = Background()
    queries = Queries(ledger)
    for loop in (drain.run, reconciler.run, keyring.run, spend.run, prices.run):
        _run_beside(stack, loop)
    stack.push_async_callback(reconciler.finish, _SETTLE_SECONDS)
    stack.push_async_callback(background.close, _SETTLE_SECONDS)
    await _look_at_database(keyring)
    if not keyring.is_sample:
        await _ensure_key(keys, settings, clock)
    get_logger("gateway").info("started", instance=journal.instance, recovered_turns=recovered)
    dispatcher = Dispatcher(
        fleet=fleet,
        gate=_gate(settings, fleet, metrics, admission, clock),
        router=router,
        journal=journal,
        reconciler=reconciler,
        metrics=metrics,
        clock=clock,
    )
    return Services(
        turns=_turn_service(dispatcher, admission, billing, queries, background),
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
        clock=clock,
        removes_nonces=settings.remove_nonces,
    )


def _turn_service(
    dispatcher: Dispatcher,
    admission: Admission,
    billing: Billing,
    queries: Queries,
    background: Background,
) -> TurnService:
    return TurnService(
        dispatcher=dispatcher,
        journal=dispatcher.journal,
        reconciler=dispatcher.reconciler,
        admission=admission,
        billing=billing,
        metrics=dispatcher.metrics,
        background=background,
        diagnostics=PromptComparer(queries.fingerprint, background),
        residency=LastHolders(dispatcher.fleet.epoch_of),
        clock=dispatcher.clock,
    )


def _gate(
    settings: Settings, fleet: Fleet, metrics: Metrics, admission: Admission, clock: Clock
) -> Gate:
    return Gate(
        fleet.engines,
        metrics,
        clock.monotonic,
        admission,
        wait_seconds=settings.queue_seconds,
        queue_tokens=settings.engine_queue_tokens,
    )


def _weights(settings: Settings) -> Weights:
    return Weights(
        load_weight=settings.routing_load_weight,
        host_cost=settings.routing_host_cost,
        fade_seconds=settings.routing_fade_seconds,
    )


def _open_ledger(stack: AsyncExitStack, settings: Settings) -> Ledger:
    ledger = Ledger(settings.ledger_url)
    stack.push_async_callback(ledger.close)
    return ledger


def _open_journal(stack: AsyncExitStack, settings: Settings, metrics: Metrics) -> Journal:
    journal = Journal(settings.data / "journal", settings.journal_max_bytes)
    stack.push_async_callback(journal.stop)
    metrics.watch_journal(
        lambda: journal.backlog,
        lambda: journal.num_bytes,
        lambda: journal.has_room,
        journal.max_bytes,
    )
    return journal


async def _start_fleet(
    stack: AsyncExitStack, settings: Settings, weights: Weights, clock: Clock
) -> Fleet:
    http = EngineHttp()
    stack.push_async_callback(http.aclose)
    secret = settings.engine_secret.get_secret_value()

    def make(name: str, url: str) -> Engine:
        return Engine(
            name,
            url,
            secret,
            http,
            weights=weights,
            learns=not settings.routing_events,
            monotonic=clock.monotonic,
        )

    fleet = Fleet(settings.engines, make)
    await fleet.start()
    stack.push_async_callback(fleet.stop)
    return fleet


def _run_beside(stack: AsyncExitStack, loop: Loop) -> None:
    """Run a loop until the gateway stops; it ends between two rounds, not in the middle of one."""
    stopping = asyncio.Event()
    task = asyncio.create_task(loop(stopping))

    async def stop() -> None:
        stopping.set()
        await asyncio.wait({task}, timeout=_STOP_SECONDS)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(stop)


async def _look_at_database(keyring: KeyRing) -> None:
    """Before the first turn, for one of sample data serves none; one that is away is asked again
    in the background."""
    try:
        await keyring.refresh()
    except LedgerUnavailable as error:
        get_logger("gateway").warning("database_not_looked_at", error=str(error))
    if keyring.is_sample:
        get_logger("gateway").warning("sample_data", serves_turns=False)


async def _ensure_key(keys: Keys, settings: Settings, clock: Clock) -> None:
    """Store the configured key; without a database it works from memory all the same."""
    if settings.api_key is None:
        return
    key = settings.api_key.get_secret_value()
    try:
        await keys.create(key, DEFAULT_WORKSPACE, "configured", clock.wall())
    except LedgerUnavailable as error:
        get_logger("gateway").warning("key_not_stored", error=str(error))
