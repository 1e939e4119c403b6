"""Time between tokens of running answers while long new prompts arrive, with and without roles.

Two native engines share a store, behind one gateway. Without roles both take whole turns. With
roles one prefills (`ENGINE_ROLE=prefill`) and the other answers (`decode`). Some answers run all
the time. New prompts, each marked for an hour, arrive one after another. A row has the pauses
between two pieces of the running answers from the first new prompt to the last one's answer, and
the new prompts' times to their first token. `in two legs` counts the new prompts that another
engine prefilled. The model is a Llama-style one with random weights.
"""

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from scripts.bench.common import MODEL_OPTIONS, RandomModel, bench_model, text_of_tokens
from scripts.bench.load import Answer, body_of, marked
from scripts.bench.report import percentile, table_of
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, ENGINE_SECRET, serving_engine, serving_gateway

END_OF_TEXT = "2"
ROLES = {"without roles": ("both", "both"), "with roles": ("prefill", "decode")}
QUESTION = "Why?"


@dataclass
class Outcome:
    """`gaps` and `first` are seconds; `errors` counts answers that broke."""

    name: str
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    num_in_two_legs: int = 0
    errors: int = 0

    def gap(self, share: float) -> float:
        return percentile(self.gaps, share) * 1e3


class Reader:
    """A running answer; `times` are those of its pieces."""

    def __init__(self, http: httpx.AsyncClient, model: str, number: int, max_tokens: int) -> None:
        self._http = http
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": f"Answer {number}: go on."}],
            "max_tokens": max_tokens,
            "stream": True,
            "logit_bias": {END_OF_TEXT: -100},
        }
        self.times: list[float] = []
        self.has_begun = asyncio.Event()

    async def run(self) -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=self._body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    self.times.append(time.perf_counter())
                    self.has_begun.set()

    def gaps(self, begin: float, end: float) -> list[float]:
        inside = [moment for moment in self.times if begin <= moment <= end]
        return [later - one for one, later in pairwise(inside)]


@asynccontextmanager
async def running_answers(
    http: httpx.AsyncClient, model: str, count: int, max_tokens: int
) -> AsyncIterator[list[Reader]]:
    readers = [Reader(http, model, number, max_tokens) for number in range(count)]
    tasks = [asyncio.create_task(reader.run()) for reader in readers]
    try:
        for reader in readers:
            await reader.has_begun.wait()
        yield readers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    name: str, url: str, engines: list[str], model: RandomModel, options: Namespace
) -> Outcome:
    outcome = Outcome(name)
    served = model.path.name
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, headers=API_HEADERS, timeout=600, trust_env=False)
        )
        readers = await stack.enter_async_context(
            running_answers(http, served, options.answers, 2 * options.tokens)
        )
        await asyncio.sleep(2.0)
        began = time.perf_counter()
        for number in range(options.prompts):
            system = marked(text_of_tokens(model.count, f"{name} {number}", options.tokens), "1h")
            body = body_of(served, system, QUESTION, stream=True, max_tokens=4)
            before = await computed(engines[0])
            answer = await asked(http, body)
            if answer.error or answer.first_seconds is None:
                outcome.errors += 1
                continue
            outcome.first.append(answer.first_seconds)
            grown = await computed(engines[0]) - before
            is_answered_there = answer.message["holdfast"]["engine"] == "engine-0"
            outcome.num_in_two_legs += grown >= options.tokens // 2 and not is_answered_there
        ended = time.perf_counter()
        for reader in readers:
            outcome.gaps += reader.gaps(began, ended)
    return outcome


async def asked(http: httpx.AsyncClient, body: Mapping[str, object]) -> Answer:
    answer = Answer()
    async with http.stream("POST", "/v1/messages", json=body) as reply:
        async for line in reply.aiter_lines():
            answer.take(line)
            if answer.first_seconds is None and answer.message:
                answer.first_seconds = time.perf_counter() - answer.begun
    return answer


async def computed(engine: str) -> int:
    """Prompt tokens that an engine has computed."""
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
        reply = await http.get(f"{engine}/v1/stats")
    return int(reply.raise_for_status().json()["counters"]["computed_tokens"])


def run(name: str, model: RandomModel, options: Namespace) -> Outcome:
    with TemporaryDirectory(prefix="roles-") as directory, ExitStack() as life:
        folder = Path(directory)
        servers = [
            life.enter_context(
                serving_engine(
                    "native",
                    {
                        "ENGINE_MODEL": str(model.path),
                        "ENGINE_NUM_BLOCKS": str(options.blocks),
                        "ENGINE_THREADS": str(options.threads),
                        "ENGINE_STORE": str(folder / "store"),
                        "ENGINE_STORE_SHARED": "true",
                        "ENGINE_ROLE": role,
                    },
                    folder / f"engine-{number}.log",
                )
            )
            for number, role in enumerate(ROLES[name])
        ]
        engines = [server.wait().url for server in servers]
        gateway = life.enter_context(
            serving_gateway(folder / "gateway", engines, log=folder / "gateway.log")
        ).wait()
        return asyncio.run(measure(name, gateway.url, engines, model, options))


def main() -> int:
    options = parse(
        __doc__,
        prompts=(8, "new prompts"),
        tokens=(8192, "tokens of a new prompt"),
        answers=(4, "answers that run meanwhile"),
        blocks=(8192, "KV blocks of each engine"),
        threads=(1, "CPU threads of each engine"),
        **MODEL_OPTIONS,
    )
    with bench_model(options.hidden, options.layers, 4 * options.tokens) as model:
        outcomes = [run(name, model, options) for name in ROLES]
    columns: dict[str, str | Callable[[Outcome], str]] = {
        "engines": "{.name}",
        "between tokens, p50 ms": lambda one: f"{one.gap(0.5):.1f}",
        "p95 ms": lambda one: f"{one.gap(0.95):.1f}",
        "p99 ms": lambda one: f"{one.gap(0.99):.1f}",
        "first token of a new prompt, p50 s": lambda one: f"{percentile(one.first, 0.5):.2f}",
        "in two legs": "{.num_in_two_legs}",
        "errors": "{.errors}",
    }
    print(table_of(outcomes, columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
