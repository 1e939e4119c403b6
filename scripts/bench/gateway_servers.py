"""The servers that `scripts.bench.gateway` starts, each on one core: an engine's stub, our gateway,
its libraries alone, and peers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.journal.store import ASIDE, rows_in
from scripts import stack
from scripts.bench.routers import Router
from scripts.stack import API_HEADERS, free_port, gateway_environment, python, run, url_of

SERVER_CORE, OTHER_CORE = 0, 1


@dataclass(frozen=True, slots=True)
class PinnedServer:
    """A running process; `headers` go with every request to it. `journal` is a gateway's folder."""

    pid: int
    port: int
    headers: dict[str, str] = field(default_factory=dict)
    journal: Path | None = None

    def backlog(self) -> int:
        """Turns that our gateway has not copied to its ledger yet.

        Its files tell, since a look at its metrics costs it as much CPU as five turns.
        """
        if self.journal is None:
            return 0
        return sum(row.state != ASIDE for row in rows_in(self.journal))


@contextmanager
def engine_stub() -> Iterator[PinnedServer]:
    port = free_port()
    command = [*python("scripts.bench.gateway_engine"), str(port)]
    with _serving(command, port, core=OTHER_CORE) as server:
        yield server


@contextmanager
def our_gateway(engine: PinnedServer, data: Path) -> Iterator[PinnedServer]:
    """As shipped: SQLite for journal and ledger, a key, metrics, log level info."""
    port = free_port()
    settings = gateway_environment(port, data, [url_of(engine.port)])
    run([*python("gateway"), "migrate"], settings)
    with _serving([*python("gateway"), "serve"], port, settings, API_HEADERS) as server:
        yield replace(server, journal=data / "journal")


@contextmanager
def libraries(engine: PinnedServer) -> Iterator[PinnedServer]:
    """Litestar and aiohttp alone (`gateway_floor.py`)."""
    port = free_port()
    command = [*python("scripts.bench.gateway_floor"), str(port), url_of(engine.port)]
    with _serving(command, port) as server:
        yield server


@contextmanager
def peer(router: Router, engine: PinnedServer, folder: Path) -> Iterator[PinnedServer]:
    port = free_port()
    command = router.command(port, [url_of(engine.port)], folder)
    headers = {"authorization": f"Bearer {router.key}"} if router.key else {}
    with _serving(command, port, router.environment, headers, ready=router.ready) as server:
        yield server


@contextmanager
def _serving(
    command: Sequence[str],
    port: int,
    settings: Mapping[str, str] | None = None,
    headers: dict[str, str] | None = None,
    *,
    core: int = SERVER_CORE,
    ready: str = "/readyz",
) -> Iterator[PinnedServer]:
    """A process on one core, once it is ready. Raises StartError where it never is."""
    pinned = ["taskset", "-c", str(core), *command]
    base = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with stack.serving(pinned, settings or {}, port, ready=ready, base=base, quiet=True) as server:
        yield PinnedServer(server.wait().pid, port, headers or {})
