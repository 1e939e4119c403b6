"""Several synthetic engines behind several gateways that know nothing of each other."""

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Gateway:
    url: str

    def ask(self, system: str, question: str = "q", **changes: Any) -> httpx.Response:
        """One turn over a marked system prompt."""
        body = body_of("synthetic", system, question, **{"max_tokens": 4, **changes})
        url = f"{self.url}/v1/messages"
        return httpx.post(url, json=body, headers=API_HEADERS, timeout=120, trust_env=False)

    def admin(self, path: str, method: str = "GET") -> Any:
        url, headers = f"{self.url}/admin/v1/{path}", {"x-api-key": ADMIN_KEY}
        reply = httpx.request(method, url, headers=headers, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def engine(self, name: str) -> dict[str, Any]:
        return next(engine for engine in self.admin("engines") if engine["name"] == name)


@dataclass
class Fleet:
    """`engines[i]` is `engine-i` of every gateway."""

    gateways: list[Gateway]
    engines: list[str]
    processes: list[Process]
    settings: Mapping[str, str]

    def stats(self, number: int) -> dict[str, Any]:
        return self._get(number, "stats")

    def held_names(self, number: int) -> set[str]:
        """All prefixes that it holds, as it tells whoever begins to follow its events."""
        chains = self._get(number, "snapshot")["chains"]
        return {name["digest"] for chain in chains for name in chain["names"]}

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def restart(self, number: int, settings: Mapping[str, str] | None = None) -> None:
        """A new process on the same port. `settings` replace those of the fleet."""
        given = self.settings if settings is None else settings
        self.processes[number] = _engine(self.engines[number], given)
        wait_until_ready(self.engines[number], self.processes[number])

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
) -> Iterator[Fleet]:
    """Start all, wait until every gateway has every engine, and end them whatever happens."""
    engines = [url_of(free_port()) for _ in range(num_engines)]
    with ExitStack() as stack:
        fleet = Fleet([], engines, [_engine(url, settings) for url in engines], settings)
        stack.callback(lambda: stop(*fleet.processes))
        for url, process in zip(engines, fleet.processes, strict=True):
            wait_until_ready(url, process)
        gateways = [
            stack.enter_context(serving_gateway(data / f"gateway-{i}", engines, gateway_settings))
            for i in range(num_gateways)
        ]
        fleet.gateways += [Gateway(gateway.wait().url) for gateway in gateways]
        yield fleet


def _engine(url: str, settings: Mapping[str, str]) -> Process:
    environment = engine_environment(int(url.rpartition(":")[2]), settings)
    return start([*python("engine"), "--backend", "synthetic"], environment)
