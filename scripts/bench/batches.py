"""A batch of many rows over few prefixes: what sorting reads, and what interactive turns wait.

The engine is synthetic: a real cache of a bounded pool and a time model, no model. The same rows
run three times: as a batch, and as plain messages in their given order, which is mixed. Interactive
turns over a prefix of their own are sent all the while, and before with nothing beside them.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from scripts.bench.report import table
from scripts.options import parse
from scripts.stack import API_HEADERS, running_stack

WORKERS = 8


def main() -> int:
    options = parse(
        __doc__,
        rows=(10_000, "rows of the batch"),
        prefixes=(20, "prefixes that the rows share"),
        words=(1500, "words of a prefix"),
        blocks=(1536, "blocks of the engine's pool, of 16 tokens"),
        seconds=(20, "how long interactive turns are measured alone"),
        pause=(0.2, "seconds between interactive turns"),
    )
    engine = {"ENGINE_NUM_BLOCKS": str(options.blocks), "ENGINE_LOG_LEVEL": "warning"}
    found: dict[str, Any] = {}
    for kind in ("batch", "given order"):
        with (
            tempfile.TemporaryDirectory() as data,
            running_stack(Path(data), "synthetic", engine) as stack,
        ):
            found[kind] = asyncio.run(measured(stack.gateway, kind, options))
    lines = []
    for kind, (alone, beside, read, prompt, seconds) in found.items():
        share = f"{read / prompt:.1%}"
        ratio = f"{beside / alone:.2f}"
        lines.append(
            [kind, share, f"{seconds:.0f}", f"{alone * 1000:.0f}", f"{beside * 1000:.0f}", ratio]
        )
    head = ["rows run as", "read", "seconds", "p95 ms alone", "p95 ms beside", "ratio"]
    print(table(head, lines))
    return 0


async def measured(url: str, kind: str, options: Any) -> tuple[float, float, int, int, float]:
    rows = rows_of(options.rows, options.prefixes, options.words)
    async with httpx.AsyncClient(
        base_url=url, headers=API_HEADERS, timeout=600, trust_env=False
    ) as client:
        await first_token(client, options.words)
        stopping = asyncio.Event()
        asyncio.get_running_loop().call_later(options.seconds, stopping.set)
        alone = await interactive(client, stopping, options)
        stopping = asyncio.Event()
        beside = asyncio.create_task(interactive(client, stopping, options))
        began = time.monotonic()
        usages = await (as_batch if kind == "batch" else in_order)(client, rows)
        seconds = time.monotonic() - began
        stopping.set()
        waited = await beside
    read = sum(usage["cache_read_input_tokens"] for usage in usages)
    written = sum(usage["cache_creation_input_tokens"] for usage in usages)
    prompt = read + written + sum(usage["input_tokens"] for usage in usages)
    return p95(alone), p95(waited), read, prompt, seconds


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


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


if __name__ == "__main__":
    sys.exit(main())
