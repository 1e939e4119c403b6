"""A gateway before native engines, for attacks: few descriptors, logs in files, engines to kill."""

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.bench.load import Answer, ask, body_of, headers_of
from scripts.stack import (
    Process,
    Server,
    engine_environment,
    free_port,
    gateway_environment,
    python,
    run,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.isolation.probes import new_key

DESCRIPTORS = 1024
ENGINE = {"ENGINE_LOG_LEVEL": "error", "ENGINE_MIN_CACHE_TOKENS": "64"}
GATEWAY = {"HOLDFAST_LOG_LEVEL": "error", "HOLDFAST_QUEUE_SECONDS": "60"}
MODEL = "holdfast-demo"
CONTEXT = 16384
WORDS = "amber birch cedar delta ember fjord grove haven inlet jetty knoll ledge maple".split()


def text(rng: random.Random, num_words: int) -> str:
    """Words that no other prompt begins with, of about two tokens each."""
    return " ".join([f"{rng.getrandbits(64):x}", *rng.choices(WORDS, k=num_words)])


@dataclass(slots=True)
class House:
    """`engines[i]` is served by `processes[i]`, which changes when that engine is restarted."""

    data: Path
    gateway: Server
    engines: list[str]
    processes: list[Process]
    backend: str
    model: str

    def new_key(self, workspace: str) -> str:
        return new_key(self.data, workspace)[1]

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        self.processes[number].wait()

    def restart(self, number: int) -> None:
        """A new process on the same port; it is ready when this returns."""
        self.processes[number] = _engine(self.engines[number], self.backend, self.data)
        wait_until_ready(self.engines[number], self.processes[number])


class Victim:
    """A workspace that asks short questions behind a cached prefix, one after another."""

    def __init__(self, house: House, key: str, num_words: int) -> None:
        self._http = httpx.AsyncClient(
            base_url=house.gateway.url, headers=headers_of(key), timeout=180
        )
        self._model, self._system = house.model, text(random.Random(7), num_words)

    async def ask(self) -> Answer:
        question = f"Question {random.random()}?"
        return await ask(self._http, body_of(self._model, self._system, question, stream=True))


@contextmanager
def running_house(data: Path, num_engines: int, backend: str = "native") -> Iterator[House]:
    """Start all, wait until all serve, and end them whatever happens."""
    engines = [url_of(free_port()) for _ in range(num_engines)]
    port = free_port()
    environment = gateway_environment(port, data, engines, GATEWAY)
    run([*python("gateway"), "migrate"], environment)
    house = House(
        data=data,
        gateway=Server(url_of(port), _gateway(environment, data), data / "gateway.log"),
        engines=engines,
        processes=[_engine(url, backend, data) for url in engines],
        backend=backend,
        model=MODEL if backend == "native" else "synthetic",
    )
    try:
        for url, process in zip(engines, house.processes, strict=True):
            wait_until_ready(url, process)
        house.gateway.wait()
        yield house
    finally:
        stop(house.gateway.process, *house.processes)


def _gateway(environment: dict[str, str], data: Path) -> Process:
    command = [*python("gateway"), "serve"]
    return start(command, environment, data / "gateway.log", before_exec=_few_descriptors)


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


def _engine(url: str, backend: str, data: Path) -> Process:
    port = int(url.rpartition(":")[2])
    command = [*python("engine"), "--backend", backend]
    return start(command, engine_environment(port, ENGINE), data / f"engine-{port}.log")
