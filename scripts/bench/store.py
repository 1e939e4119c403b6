"""What the store on disk costs and gives: throughput with and without, speed, and break-even.

cost: prompts that nobody has sent before, each with a 1-hour breakpoint, go to an engine without
and to one with a store, in turn. Nobody reads what is stored. Told is the processor time of the
engine's process for each token of prompt and answer, with all that is written until nothing waits,
and the tokens a second that the clients saw.

speed: bytes a second of the store's own threads, written and read as blocks with header, seal and
digests, and of plain files of as many bytes, in turn.

even: time to the first token of prompts of growing length: cold, and with the prompt on the device,
in the host tier, in the store after a restart, and in the store of another member.

The model has random weights. Its keys and values have many bytes for what a token costs to compute:
20 times those of an 8B model for each floating-point operation. So the cost is an upper bound.
"""

import random
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.bench.common import MODEL_OPTIONS, bench_model
from scripts.bench.report import median_interval, table_of, verdict
from scripts.bench.store_speed import tell_speed
from scripts.bench.store_tiers import tell_break_even
from scripts.faults.store import Client, prompt_of, serving
from scripts.setup.options import parse
from scripts.stack import Server, cpu_seconds, free_port

PARTS = ("cost", "speed", "even")
MOST_COST = 0.02
ANSWER_TOKENS = 16


@dataclass
class Subject:
    """One engine of two, and what its rounds took: CPU and wall seconds a token."""

    name: str
    server: Server
    client: Client
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def main() -> int:
    options = parse(
        __doc__,
        parts=(list(PARTS), "which of them"),
        rounds=(12, "of the cost, each with and without"),
        turns=(8, "prompts of a round"),
        words=(400, "words of a prompt of the cost"),
        clients=(4, "prompts at one time"),
        lengths=([25, 50, 100, 250, 500, 1000, 2000, 4000], "words of prompts of the break-even"),
        repeats=(3, "prompts of each length"),
        files=(512, "files of the speed"),
        threads=(1, "CPU threads of the engine"),
        seed=1,
        **MODEL_OPTIONS,
    )
    is_good = True
    with (
        TemporaryDirectory(prefix="store-") as directory,
        bench_model(options.hidden, options.layers, 16_384) as model,
    ):
        folder, more = Path(directory), {"ENGINE_MODEL": str(model.path)}
        if "cost" in options.parts:
            is_good = tell_cost(folder, more, options)
        if "speed" in options.parts:
            tell_speed(folder, options)
        if "even" in options.parts:
            tell_break_even(folder, more, options)
    return 0 if is_good else 1


def tell_cost(folder: Path, more: dict[str, str], options: Namespace) -> bool:
    """Whether the store costs as little as it must."""
    rng = random.Random(options.seed)
    with ExitStack() as stack:
        subjects = []
        for name in ("without", "with"):
            store = folder / "cost" if name == "with" else None
            log = folder / f"{name}.log"
            life = serving(free_port(), store, log, options.threads, more)
            subjects.append(Subject(name, *stack.enter_context(life)))
        for subject in subjects:
            run_round(subject, texts_of(rng, options), options.clients)
            subject.cpu.clear()
            subject.wall.clear()
        for number in range(options.rounds):
            texts = texts_of(rng, options)
            for subject in subjects if number % 2 else reversed(subjects):
                run_round(subject, texts, options.clients)
        found = subjects[1].client.stats().store
    assert found is not None
    without, having = subjects
    more_cpu = [one / other - 1 for one, other in zip(having.cpu, without.cpu, strict=True)]
    columns: dict[str, str | Callable[[Subject], str]] = {
        "store": "{0.name}",
        "CPU us a token": lambda one: f"{median_interval(one.cpu)[0] * 1e6:.1f}",
        "tokens/s": lambda one: f"{1 / median_interval(one.wall)[0]:.0f}",
    }
    print(table_of(subjects, columns))
    median, low, high = median_interval(more_cpu)
    print(
        f"the store costs {median:+.1%} of CPU time (95 % {low:+.1%} to {high:+.1%}); at most"
        f" {MOST_COST:.0%}: {verdict(median <= MOST_COST)}"
    )
    print(f"written {found.written_bytes / 2**20:.0f} MiB, {found.entries} entries\n", flush=True)
    return median <= MOST_COST


def texts_of(rng: random.Random, options: Namespace) -> list[str]:
    return [prompt_of(rng, options.words) for _ in range(options.turns)]


def run_round(subject: Subject, texts: list[str], clients: int) -> None:
    client = subject.client
    cpu, began = cpu_seconds(subject.server.pid), time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = pool.map(
            lambda text: client.ask(text, "bench", is_marked=True, max_tokens=ANSWER_TOKENS), texts
        )
        tokens = sum(one.started.usage.prompt_tokens + ANSWER_TOKENS for one in answers)
    subject.wall.append((time.monotonic() - began) / tokens)
    client.settle()
    subject.cpu.append((cpu_seconds(subject.server.pid) - cpu) / tokens)


if __name__ == "__main__":
    sys.exit(main())
