"""Several engines behind several gateways that know nothing of each other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from scripts.bench.load import MESSAGES, body_of, headers_of
from scripts.stack import (
    API_KEY,
    ENGINE_SECRET,
    Process,
    engine_environment,
    free_port,
    python,
    serving_gateway,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.e2e.prompts import MODEL
from tests.gateway.admin_client import Admin
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually

Settings = Mapping[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Gateway(Admin):
    """`model`: whom its engines serve; `workspace_key`: of the workspace that asks."""

    model: str = "synthetic"
    workspace_key: str = API_KEY
    data: Path = Path()

    def send(self, path: str = MESSAGES, **body: Any) -> httpx.Response:
        """A body as it is, but for the model."""
        url = f"{self.url}{path}"
        headers = headers_of(self.workspace_key)
        return httpx.post(
            url, json={"model": self.model, **body}, headers=headers, timeout=600, trust_env=False
        )

    def ask(
        self, system: str | list[dict[str, Any]], question: str = "q", **changes: Any
    ) -> httpx.Response:
        """One turn over a system prompt; a text is marked."""
        return self.send(**body_of(self.model, system, question, **{"max_tokens": 4, **changes}))

    def answer(self, *messages: Any, **changes: Any) -> dict[str, Any]:
        """As `ask`, of an answer in one piece that must be good."""
        reply = self.ask(*messages, **changes)
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    def engine(self, number: int) -> dict[str, Any]:
        name = f"engine-{number}"
        return next(engine for engine in self.get("engines") if engine["name"] == name)

    def use(self, number: int, how: str) -> None:
        """`drain` an engine, or `resume` it."""
        self.post(f"engines/engine-{number}/{how}")

    @property
    def backlog(self) -> int:
        """The turns in its journal."""
        reply = httpx.get(f"{self.url}/readyz", timeout=120, trust_env=False).json()
        return int(reply["journal_backlog"])

    def rows(self) -> list[dict[str, Any]]:
        """The ledger's turns, once all are in it."""
        eventually(lambda: self.backlog == 0)
        return ledger_rows(f"sqlite:///{self.data / 'ledger.db'}")


@dataclass
class Fleet:
    """`engines[i]` is `engine-i` of every gateway; `per_engine[i]` are its own settings."""

    engines: list[str]
    settings: Settings
    backend: str = "synthetic"
    per_engine: Sequence[Settings] = ()
    gateways: list[Gateway] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    def stats(self, number: int = 0) -> dict[str, Any]:
        return self.told("stats", dict[str, Any], number)

    def chains(self, number: int) -> list[dict[str, Any]]:
        """All that it holds, as it tells whoever begins to follow its events."""
        chains: list[dict[str, Any]] = self.told("snapshot", dict[str, Any], number)["chains"]
        return chains

    def held_names(self, number: int) -> set[str]:
        """All prefixes that it holds."""
        return {name["digest"] for chain in self.chains(number) for name in chain["names"]}

    def kill(self, number: int = 0) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def restart(self, number: int = 0, settings: Settings | None = None) -> None:
        """A new process on the same port. `settings` replace those of the fleet."""
        changed = self.settings if settings is None else settings
        self.processes[number] = self._start(number, changed)
        wait_until_ready(self.engines[number], self.processes[number])

    def num_ready(self) -> int:
        """Engines that the first gateway has in use."""
        return [engine["status"] for engine in self.gateway.get("engines")].count("ready")

    def all_ready(self) -> bool:
        return all(
            engine["status"] == "ready" and not engine["routing"]["is_stale"]
            for gateway in self.gateways
            for engine in gateway.get("engines")
        )

    def restored(self) -> "Fleet":
        """All of it is in use, whatever became of the test before."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.restart(number)
            for gateway in self.gateways:
                gateway.use(number, "resume")
        eventually(self.all_ready)
        return self

    def start(self) -> None:
        self.processes += [self._start(i, self.settings) for i in range(len(self.engines))]

    def _start(self, number: int, settings: Settings) -> Process:
        url = self.engines[number]
        of_engine = self.per_engine[number] if self.per_engine else {}
        merged = {"ENGINE_LOG_LEVEL": "error", **settings, **of_engine}
        environment = engine_environment(int(url.rpartition(":")[2]), merged)
        backend = of_engine.get("ENGINE_BACKEND", self.backend)
        return start([*python("engine"), "--backend", backend], environment)

    def told(self, path: str, kind: type[T], number: int = 0) -> T:
        """What the engine itself answers."""
        return self._call("GET", path, kind, number)

    def advance(self, seconds: float) -> None:
        """The first engine's manual clock."""
        self._call("POST", "clock/advance", dict[str, Any], json={"seconds": seconds})

    def _call(self, method: str, path: str, kind: type[T], number: int = 0, **more: Any) -> T:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        url = f"{self.engines[number]}/v1/{path}"
        reply = httpx.request(method, url, headers=headers, timeout=120, trust_env=False, **more)
        return msgspec.json.decode(reply.raise_for_status().content, type=kind)


@contextmanager
def running_fleet(
    data: Path,
    num_engines: int = 1,
    num_gateways: int = 1,
    settings: Settings | None = None,
    gateway_settings: Settings | None = None,
    backend: str = "synthetic",
    per_engine: Sequence[Settings] = (),
) -> Iterator[Fleet]:
    """Start all, wait until every gateway has every engine, and end them whatever happens."""
    quiet = {"HOLDFAST_LOG_LEVEL": "error", **(gateway_settings or {})}
    with ExitStack() as stack:
        fleet = Fleet(
            [url_of(free_port()) for _ in range(num_engines)], settings or {}, backend, per_engine
        )
        stack.callback(lambda: stop(*fleet.processes))
        fleet.start()
        for url, process in zip(fleet.engines, fleet.processes, strict=True):
            wait_until_ready(url, process)
        model = "synthetic" if backend == "synthetic" else MODEL
        homes = [data / f"gateway-{number}" for number in range(num_gateways)]
        started = [
            stack.enter_context(serving_gateway(home, fleet.engines, quiet)) for home in homes
        ]
        fleet.gateways += [
            Gateway(gateway.wait().url, model=model, data=home)
            for gateway, home in zip(started, homes, strict=True)
        ]
        yield fleet
