"""What handlers may use: built once by the composition root, the same for every request."""

from dataclasses import dataclass
from typing import Any

import litestar

from gateway.api.auth import AdminGate
from gateway.catalogue import Catalogue, Model
from gateway.clock import Clock
from gateway.fleet import Fleet
from gateway.journal.writer import Journal
from gateway.keyring import KeyRing
from gateway.ledger.keys import Keys
from gateway.ledger.queries import Queries
from gateway.ledger.workspaces import Workspaces
from gateway.metrics import Metrics
from gateway.prefix.nonces import Request, without_nonces
from gateway.pricing import PriceBook
from gateway.turn import TurnService


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    turns: TurnService
    fleet: Fleet
    catalogue: Catalogue
    keyring: KeyRing
    admin: AdminGate
    keys: Keys
    workspaces: Workspaces
    queries: Queries
    prices: PriceBook
    journal: Journal
    metrics: Metrics
    clock: Clock
    removes_nonces: bool

    def find_model(self, requested: str) -> Model:
        return self.catalogue.find(requested, self.fleet.served)

    def without_nonces(self, request: Request) -> tuple[Request, int]:
        return without_nonces(request) if self.removes_nonces else (request, 0)


def services_of(request: litestar.Request[Any, Any, Any]) -> Services:
    """What the dependency `services` is, for calls that run turns: injecting it, and headers, would
    cost each of them as much as reading its body does."""
    services: Services = request.app.state.services
    return services
