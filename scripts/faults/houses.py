"""A gateway before native engines, for attacks: few descriptors, logs in files, engines to kill."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
