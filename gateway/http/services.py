"""What handlers may use: built once by the composition root, the same for every request."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import litestar

from engine.protocol.reports import Description
from engine.supervisor import Supervisor
from gateway.admission.keyring import KeyRing
from gateway.admission.rates import Counting, ReadKind, ReadLimit
from gateway.admission.shared import SharedLimits
from gateway.admission.workers import Workers
from gateway.base.bounds import Tuning
from gateway.base.catalogue import Catalogue, CatalogueModel
from gateway.base.clock import Clock
from gateway.base.errors import ModelNotFound, NoEngineReady
from gateway.base.metrics import Metrics
from gateway.conditions.watch import Conditions
from gateway.dialects.lowering import RequestContext
from gateway.http.auth import AdminGate
from gateway.http.image_hosts import ImageHosts
from gateway.journal.store import Journal
from gateway.ledger.access import Keys, Workspaces
from gateway.ledger.batches import Batches
from gateway.ledger.cached_contents import CachedContents
from gateway.ledger.identity import Identity
from gateway.ledger.reads.sums import Queries
from gateway.ledger.refusals import RefusalCounter, RefusalsTable
from gateway.ledger.sealed import Sealing
from gateway.planning.process import Planners
from gateway.prices.files import PriceBook
from gateway.prompt.ask import Principal
from gateway.prompt.media import Unreadable
from gateway.prompt.wish import ApproximateMark
from gateway.routing.fleet import Fleet
from gateway.routing.history import LoadHistory
from gateway.turn.contents import StoredResponses
from gateway.turn.sweep import Sweep
from gateway.turn.turn import TurnService


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    turns: TurnService
    fleet: Fleet
    load_history: LoadHistory
    catalogue: Catalogue
    keyring: KeyRing
    admin: AdminGate
    keys: Keys
    workspaces: Workspaces
    queries: Queries
    prices: PriceBook
    journal: Journal
    conditions: Conditions
    metrics: Metrics
    supervisor: Supervisor
    ledger: Identity
    reads: Mapping[ReadKind, ReadLimit]
    planners: Planners
    summaries: dict[str | None, tuple[float, Any]] = field(default_factory=dict)
    summarizing: WeakValueDictionary[str | None, asyncio.Lock] = field(
        default_factory=WeakValueDictionary
    )
    clock: Clock
    workers: Workers
    counting: Counting
    shared_limits: SharedLimits | None
    bounds: Tuning
    cached_contents: CachedContents
    sealing: Sealing
    sweep: Sweep
    batches: Batches
    removes_nonces: bool
    unreadable: Unreadable
    auto_cache_messages: bool
    responses: StoredResponses
    image_hosts: ImageHosts
    refusals: RefusalCounter
    refused: RefusalsTable

    def find_model(self, requested: str) -> CatalogueModel:
        """The model of a requested id. Raise ModelNotFound, or NoEngineReady while no model is
        known and an engine that may have it is starting."""
        served = self.fleet.served
        try:
            return self.catalogue.find(requested, served)
        except ModelNotFound:
            is_starting = any(engine.status == "starting" for engine in self.fleet.engines)
            if served.models or served.known or not is_starting:
                raise
            raise NoEngineReady("no engine has said yet which model it serves") from None

    def name_of(self, described: Description | None) -> str | None:
        """The one name of an engine's model; None while the engine has not described itself."""
        return None if described is None else self.catalogue.name_of(described.model)

    def context_of(
        self,
        user: Principal,
        model: CatalogueModel,
        arrived: float,
        header_mark: ApproximateMark | None = None,
    ) -> RequestContext:
        return RequestContext(
            user,
            model,
            arrived,
            self.unreadable,
            self.removes_nonces,
            self.responses.keeps(user),
            fetched={} if self.image_hosts.hosts else None,
            header_mark=header_mark,
        )


def services_of(request: litestar.Request[Any, Any, Any]) -> Services:
    """The application's services. Injecting them costs as much as reading a body."""
    services: Services = request.app.state.services
    return services
