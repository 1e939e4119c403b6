"""A batch of many rows over few prefixes: what sorting reads, and what interactive turns wait.

The engine is synthetic: a real cache of a bounded pool and a time model, no model. Interactive
turns over a prefix of their own are sent all the while. The rows come in rounds. Between two rounds
the interactive turns go on alone, so that both kinds of turns see the same machine.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.load import ask, body_of
from scripts.bench.report import table
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, running_stack

NUM_PREFIXES, PREFIX_WORDS = 20, 1500
PAUSE_SECONDS = 0.2
ENGINE = {
    "ENGINE_NUM_BLOCKS": "1536",
    "ENGINE_LOG_LEVEL": "warning",
    "ENGINE_SYNTHETIC_DECODE_MS": "20",
}
CLASSES = ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
HEADINGS = (
    *("rows", "read", "seconds", "turns"),
    *("p50 ms alone", "beside", "p95 ms alone", "beside", "ratio"),
)


def main() -> int:
    options = parse(
        __doc__,
        rows=(10_000, "rows of the batch"),
        rounds=(5, "in how many batches the rows come"),
        seconds=(20, "how long interactive turns go on alone, in each round"),
    )
    with (
        tempfile.TemporaryDirectory() as data,
        running_stack(Path(data), "synthetic", ENGINE) as stack,
    ):
        print(table(HEADINGS, [asyncio.run(measured(stack.gateway, options))]))
    return 0


async def measured(url: str, options: argparse.Namespace) -> list[str]:
    rows = [body(f"shared {index % NUM_PREFIXES}", f"row {index}") for index in range(options.rows)]
    random.Random(1).shuffle(rows)
    size = -(-len(rows) // options.rounds)
    alone, beside, usages, seconds = list[float](), list[float](), list[dict[str, int]](), 0.0
    async with httpx.AsyncClient(
        base_url=url, headers=API_HEADERS, timeout=600, trust_env=False
    ) as client:
        await ask(client, body("interactive", "first", stream=True))
        for start in range(0, len(rows), size):
            stopping = asyncio.Event()
            asyncio.get_running_loop().call_later(options.seconds, stopping.set)
            alone += await interactive(client, stopping)
            stopping = asyncio.Event()
            turns = asyncio.create_task(interactive(client, stopping))
            began = time.monotonic()
            usages += await batch(client, rows[start : start + size])
            seconds += time.monotonic() - began
            stopping.set()
            beside += await turns
    read, written, rest = (sum(usage[name] for usage in usages) for name in CLASSES)
    quantiles = [statistics.quantiles(times, n=100) for times in (alone, beside)]
    times = [each[share - 1] for share in (50, 95) for each in quantiles]
    return [
        str(len(rows)),
        f"{read / (read + written + rest):.1%}",
        f"{seconds:.0f}",
        f"{len(alone)}, {len(beside)}",
        *(f"{seconds * 1000:.1f}" for seconds in times),
        f"{times[3] / times[2]:.2f}",
    ]


def body(prefix: str, question: str, **changes: Any) -> dict[str, Any]:
    text = " ".join([prefix, *(f"word{index}" for index in range(PREFIX_WORDS // 2))])
    return body_of("synthetic", text, question, **changes)


async def batch(client: httpx.AsyncClient, rows: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Run the rows as one batch; their usages."""
    requests = [{"custom_id": f"r{n}", "params": row} for n, row in enumerate(rows)]
    made = (await client.post("/v1/messages/batches", json={"requests": requests})).json()
    path = f"/v1/messages/batches/{made['id']}"
    while (await client.get(path)).json()["processing_status"] != "ended":
        await asyncio.sleep(0.5)
    lines = (await client.get(f"{path}/results")).text.splitlines()
    results = [httpx.Response(200, content=line).json()["result"] for line in lines]
    assert all(result["type"] == "succeeded" for result in results)
    return [result["message"]["usage"] for result in results]


async def interactive(client: httpx.AsyncClient, stopping: asyncio.Event) -> list[float]:
    """Seconds to the first token of turns one after the other."""
    waited = []
    while not stopping.is_set():
        answer = await ask(client, body("interactive", f"now {time.monotonic()}", stream=True))
        waited.append(answer.first_seconds or answer.seconds)
        await asyncio.sleep(PAUSE_SECONDS)
    return waited


if __name__ == "__main__":
    sys.exit(main())
