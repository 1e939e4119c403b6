"""A gateway before native engines, for attacks: few descriptors, logs in files, engines to kill."""

import random
import resource
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx

from scripts.bench.load import Answer, ask, body_of, headers_of
from scripts.stack import (
    Server,
    free_port,
    gateway_environment,
    migrate,
    python,
    serving_engine,
    start,
    stop,
    url_of,
)
from tests.gateway.process import new_key

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
    """`data` is the gateway's."""

    data: Path
    gateway: Server
    engines: Sequence[Server]

    def new_key(self, workspace: str) -> str:
        return new_key(self.data, workspace)[1]


class Victim:
    """A workspace that asks short questions behind a cached prefix, one after another."""

    def __init__(self, house: House, key: str, num_words: int, *, comes_anew: bool = False) -> None:
        """`comes_anew`: each question on a new connection."""
        self._http = httpx.AsyncClient(
            base_url=house.gateway.url,
            headers=headers_of(key),
            timeout=180,
            limits=httpx.Limits(max_keepalive_connections=0 if comes_anew else None),
        )
        self._model = MODEL
        self._system = text(random.Random(7), num_words)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self) -> Answer:
        question = f"Question {random.random()}?"
        return await ask(self._http, body_of(self._model, self._system, question, stream=True))


@contextmanager
def running_house(data: Path, num_engines: int, descriptors: int = DESCRIPTORS) -> Iterator[House]:
    """Start all, wait until all serve, and end them whatever happens. The gateway may have so many
    descriptors."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(serving_engine("native", ENGINE, data / f"engine-{number}.log"))
            for number in range(num_engines)
        ]
        port = free_port()
        environment = gateway_environment(port, data, [engine.url for engine in engines], GATEWAY)
        migrate(environment)
        command = [*python("gateway"), "serve"]
        log = data / "gateway.log"
        process = start(command, environment, log, before_exec=partial(_limit, descriptors))
        stack.callback(stop, process)
        for engine in engines:
            engine.wait()
        yield House(data, Server(url_of(port), process, log).wait(), engines)


def _limit(descriptors: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
