"""A batch of many rows over few prefixes: what sorting reads, and what interactive turns wait.

The engine is synthetic: a real cache of a bounded pool and a time model, no model. The same rows
run twice: as batches, and as plain messages in their given order, which is mixed. Interactive turns
over a prefix of their own are sent all the while. The rows come in rounds. Between two rounds the
interactive turns go on alone, so that both kinds of turns see the same machine.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.report import table
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, running_stack

WORKERS = 8


@dataclass(slots=True)
class Found:
    """Seconds to the first token with nothing else and beside rows, and the rows' usage."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    seconds: float = 0.0
    usages: list[dict[str, int]] = field(default_factory=list)

    def cells(self) -> list[str]:
        read = sum(usage["cache_read_input_tokens"] for usage in self.usages)
        written = sum(usage["cache_creation_input_tokens"] for usage in self.usages)
        prompt = read + written + sum(usage["input_tokens"] for usage in self.usages)
        times = [at(values, share) for share in (50, 95) for values in (self.alone, self.beside)]
        return [
            f"{read / prompt:.1%}",
            f"{self.seconds:.0f}",
            f"{len(self.alone)}, {len(self.beside)}",
            *(f"{seconds * 1000:.1f}" for seconds in times),
            f"{times[3] / times[2]:.2f}",
        ]


def main() -> int:
    options = parse(
        __doc__,
        rows=(10_000, "rows of the batch"),
        rounds=(5, "in how many batches the rows come"),
        prefixes=(20, "prefixes that the rows share"),
        words=(1500, "words of a prefix"),
        blocks=(1536, "blocks of the engine's pool, of 16 tokens"),
        seconds=(20, "how long interactive turns go on alone, in each round"),
        pause=(0.2, "seconds between interactive turns"),
        decode=(20.0, "milliseconds of a decode step"),
        kinds=("batch,given order", "how the rows run"),
    )
    engine = {
        "ENGINE_NUM_BLOCKS": str(options.blocks),
        "ENGINE_LOG_LEVEL": "warning",
        "ENGINE_SYNTHETIC_DECODE_MS": str(options.decode),
    }
    lines = []
    for kind in options.kinds.split(","):
        with (
            tempfile.TemporaryDirectory() as data,
            running_stack(Path(data), "synthetic", engine) as stack,
        ):
            found = asyncio.run(measured(stack.gateway, kind, options))
            lines.append([kind, *found.cells()])
    times = ["p50 ms alone", "beside", "p95 ms alone", "beside", "ratio"]
    print(table(["rows run as", "read", "seconds", "turns", *times], lines))
    return 0


async def measured(url: str, kind: str, options: Any) -> Found:
    rows = rows_of(options.rows, options.prefixes, options.words)
    size, found = -(-len(rows) // options.rounds), Found()
    async with httpx.AsyncClient(
        base_url=url, headers=API_HEADERS, timeout=600, trust_env=False
    ) as client:
        await first_token(client, options.words)
        for start in range(0, len(rows), size):
            stopping = asyncio.Event()
            asyncio.get_running_loop().call_later(options.seconds, stopping.set)
            found.alone += await interactive(client, stopping, options)
            stopping = asyncio.Event()
            beside = asyncio.create_task(interactive(client, stopping, options))
            began = time.monotonic()
            run = as_batch if kind == "batch" else in_order
            found.usages += await run(client, rows[start : start + size])
            found.seconds += time.monotonic() - began
            stopping.set()
            found.beside += await beside
    return found


def rows_of(number: int, prefixes: int, words: int) -> list[dict[str, Any]]:
    """Rows in a mixed order, the same at every call."""
    made = [message(f"shared {index % prefixes}", f"row {index}", words) for index in range(number)]
    random.Random(1).shuffle(made)
    return made


def message(prefix: str, question: str, words: int, **changes: Any) -> dict[str, Any]:
    text = " ".join([prefix, *(f"word{index}" for index in range(words // 2))])
    marked = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    asked = [{"role": "user", "content": question}]
    return {"model": "synthetic", "max_tokens": 8, "system": [marked], "messages": asked, **changes}


async def as_batch(client: httpx.AsyncClient, rows: list[dict[str, Any]]) -> list[Any]:
    requests = [{"custom_id": f"r{n}", "params": row} for n, row in enumerate(rows)]
    made = (await client.post("/v1/messages/batches", json={"requests": requests})).json()
    path = f"/v1/messages/batches/{made['id']}"
    while (await client.get(path)).json()["processing_status"] != "ended":
        await asyncio.sleep(0.5)
    lines = (await client.get(f"{path}/results")).text.splitlines()
    results = [httpx.Response(200, content=line).json()["result"] for line in lines]
    assert all(result["type"] == "succeeded" for result in results)
    return [result["message"]["usage"] for result in results]


async def in_order(client: httpx.AsyncClient, rows: list[dict[str, Any]]) -> list[Any]:
    left, usages = iter(rows), []

    async def work() -> None:
        for row in left:
            reply = await client.post("/v1/messages", json=row)
            reply.raise_for_status()
            usages.append(reply.json()["usage"])

    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return usages


async def interactive(
    client: httpx.AsyncClient, stopping: asyncio.Event, options: Any
) -> list[float]:
    waited = []
    while not stopping.is_set():
        waited.append(await first_token(client, options.words))
        await asyncio.sleep(options.pause)
    return waited


async def first_token(client: httpx.AsyncClient, words: int) -> float:
    began = time.monotonic()
    asked = message("interactive", f"now {began}", words, stream=True)
    async with client.stream("POST", "/v1/messages", json=asked) as reply:
        waited = 0.0
        async for line in reply.aiter_lines():
            if "content_block_delta" in line and not waited:
                waited = time.monotonic() - began
    return waited


def at(values: list[float], share: int) -> float:
    return statistics.quantiles(values, n=100)[share - 1]


if __name__ == "__main__":
    sys.exit(main())
