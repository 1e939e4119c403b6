"""Several engines behind several gateways that know nothing of each other."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.load import body_of
from scripts.stack import (
    ADMIN_KEY,
    API_HEADERS,
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
from tests.gateway.serving import eventually


@dataclass(frozen=True)
class Gateway:
    """`model`: whom its engines serve."""

    url: str
    model: str = "synthetic"

    def ask(
        self, system: str | list[dict[str, Any]], question: str = "q", **changes: Any
    ) -> httpx.Response:
        """One turn over a system prompt; a text is marked."""
        body = body_of(self.model, system, question, **{"max_tokens": 4, **changes})
        url = f"{self.url}/v1/messages"
        return httpx.post(url, json=body, headers=API_HEADERS, timeout=120, trust_env=False)

    def admin(self, path: str, method: str = "GET") -> Any:
        url, headers = f"{self.url}/admin/v1/{path}", {"x-api-key": ADMIN_KEY}
        reply = httpx.request(method, url, headers=headers, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def engine(self, name: str) -> dict[str, Any]:
        return next(engine for engine in self.admin("engines") if engine["name"] == name)

    def recorded(self, turn_id: str) -> dict[str, Any]:
        """The turn's row; what was asked for last may not be in the ledger yet."""
        rows: dict[str, dict[str, Any]] = {}

        def is_there() -> bool:
            rows.update((row["id"], row) for row in self.admin("turns?limit=1000"))
            return turn_id in rows

        eventually(is_there)
        return rows[turn_id]


@dataclass
class Fleet:
    """`engines[i]` is `engine-i` of every gateway; `own[i]` are its own settings."""

    gateways: list[Gateway]
    engines: list[str]
    processes: list[Process]
    settings: Mapping[str, str]
    backend: str = "synthetic"
    own: Sequence[Mapping[str, str]] = ()

    def stats(self, number: int) -> dict[str, Any]:
        return self._get(number, "stats")

    def chains(self, number: int) -> list[dict[str, Any]]:
        """All that it holds, as it tells whoever begins to follow its events."""
        chains: list[dict[str, Any]] = self._get(number, "snapshot")["chains"]
        return chains

    def held_names(self, number: int) -> set[str]:
        """All prefixes that it holds."""
        return {name["digest"] for chain in self.chains(number) for name in chain["names"]}

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def restart(self, number: int, settings: Mapping[str, str] | None = None) -> None:
        """A new process on the same port. `settings` replace those of the fleet."""
        given = self.settings if settings is None else settings
        self.processes[number] = self._start(number, given)
        wait_until_ready(self.engines[number], self.processes[number])

    def all_ready(self) -> bool:
        return all(
            engine["status"] == "ready" and not engine["routing"]["is_stale"]
            for gateway in self.gateways
            for engine in gateway.admin("engines")
        )

    def restored(self) -> "Fleet":
        """All of it is in use, whatever became of the test before."""
        for number, process in enumerate(self.processes):
            if process.poll() is not None:
                self.restart(number)
            for gateway in self.gateways:
                gateway.admin(f"engines/engine-{number}/resume", "POST")
        eventually(self.all_ready)
        return self

    def start(self) -> None:
        self.processes += [self._start(i, self.settings) for i in range(len(self.engines))]

    def _start(self, number: int, settings: Mapping[str, str]) -> Process:
        url, own = self.engines[number], self.own[number] if self.own else {}
        environment = engine_environment(int(url.rpartition(":")[2]), {**settings, **own})
        return start([*python("engine"), "--backend", self.backend], environment)

    def _get(self, number: int, path: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        url = f"{self.engines[number]}/v1/{path}"
        reply = httpx.get(url, headers=headers, timeout=120, trust_env=False)
        found: dict[str, Any] = reply.raise_for_status().json()
        return found


@contextmanager
def running_fleet(
    data: Path,
    num_engines: int,
    num_gateways: int,
    settings: Mapping[str, str],
    gateway_settings: Mapping[str, str],
    backend: str = "synthetic",
    own: Sequence[Mapping[str, str]] = (),
) -> Iterator[Fleet]:
    """Start all, wait until every gateway has every engine, and end them whatever happens."""
    engines = [url_of(free_port()) for _ in range(num_engines)]
    with ExitStack() as stack:
        fleet = Fleet([], engines, [], settings, backend, own)
        stack.callback(lambda: stop(*fleet.processes))
        fleet.start()
        for url, process in zip(engines, fleet.processes, strict=True):
            wait_until_ready(url, process)
        gateways = [
            stack.enter_context(serving_gateway(data / f"gateway-{i}", engines, gateway_settings))
            for i in range(num_gateways)
        ]
        model = "synthetic" if backend == "synthetic" else MODEL
        fleet.gateways += [Gateway(gateway.wait().url, model) for gateway in gateways]
        yield fleet
