"""Several synthetic engines behind several gateways that know nothing of each other."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import httpx

from tests.e2e.stack import (
    ADMIN_KEY,
    API_KEY,
    ENGINE_SECRET,
    MASTER_SECRET,
    free_port,
    python,
    run,
    start,
    wait_until_ready,
)


@dataclass(frozen=True)
class Gateway:
    url: str

    def ask(self, system: str, question: str = "q", **changes: Any) -> httpx.Response:
        """One turn over a marked system prompt."""
        marker = {"type": "ephemeral"}
        body = {
            "model": "synthetic",
            "max_tokens": 4,
            "system": [{"type": "text", "text": system, "cache_control": marker}],
            "messages": [{"role": "user", "content": question}],
            **changes,
        }
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
        url = f"{self.url}/v1/messages"
        return httpx.post(url, json=body, headers=headers, timeout=120, trust_env=False)

    def admin(self, path: str, method: str = "GET") -> Any:
        url, headers = f"{self.url}/admin/v1/{path}", {"x-api-key": ADMIN_KEY}
        reply = httpx.request(method, url, headers=headers, timeout=30, trust_env=False)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def engine(self, name: str) -> dict[str, Any]:
        return next(engine for engine in self.admin("engines") if engine["name"] == name)


@dataclass
class Fleet:
    """`engines[i]` is `engine-i` of every gateway."""

    gateways: list[Gateway]
    engines: list[str]
    processes: "list[Popen[bytes]]"
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

    def restart(self, number: int) -> None:
        """A new process on the same port."""
        self.processes[number] = _engine(self.engines[number], self.settings)
        wait_until_ready(self.engines[number], self.processes[number])

    def _get(self, number: int, path: str) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        url = f"{self.engines[number]}/v1/{path}"
        reply = httpx.get(url, headers=headers, timeout=30, trust_env=False)
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
    engines = [f"http://127.0.0.1:{free_port()}" for _ in range(num_engines)]
    with ExitStack() as stack:
        processes = [_engine(url, settings) for url in engines]
        fleet = Fleet([], engines, processes, settings)
        stack.callback(lambda: _end(fleet.processes))
        for url, process in zip(engines, processes, strict=True):
            wait_until_ready(url, process)
        for number in range(num_gateways):
            port = free_port()
            environment = {
                "HOLDFAST_PORT": str(port),
                "HOLDFAST_DATA": str(data / f"gateway-{number}"),
                "HOLDFAST_ENGINES": ",".join(engines),
                "HOLDFAST_API_KEY": API_KEY,
                "HOLDFAST_ADMIN_KEY": ADMIN_KEY,
                "HOLDFAST_ENGINE_SECRET": ENGINE_SECRET,
                "HOLDFAST_MASTER_SECRET": MASTER_SECRET,
                **gateway_settings,
            }
            run([*python("gateway"), "migrate"], environment)
            process = start([*python("gateway"), "serve"], environment)
            stack.callback(_end, [process])
            url = f"http://127.0.0.1:{port}"
            wait_until_ready(url, process)
            fleet.gateways.append(Gateway(url))
        yield fleet


def _engine(url: str, settings: Mapping[str, str]) -> "Popen[bytes]":
    environment = {
        "ENGINE_SECRET": ENGINE_SECRET,
        "ENGINE_PORT": url.rpartition(":")[2],
        "ENGINE_THREADS": "1",
        **settings,
    }
    return start([*python("engine"), "--backend", "synthetic"], environment)


def _end(processes: "list[Popen[bytes]]") -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except TimeoutExpired:
            process.kill()
            process.wait()
