"""What the store on disk costs and gives: throughput with and without, speed, and break-even.

cost: prompts that nobody has sent before, each with a 1-hour breakpoint, go to an engine without
and to one with a store, in turn. Nobody reads what is stored. Told is the processor time of the
engine's process for each token of prompt and answer, with all that is written until nothing waits,
and the tokens a second that the clients saw. Two processes of one engine differ by some per cent
for as long as they live, so `lives` pairs of engines take `rounds` rounds each, and each pair
counts once.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.protocol import StoreStats
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
    """An engine of two kinds, and what its rounds took: CPU and wall seconds a token."""

    name: str
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def main() -> int:
    options = parse(
        __doc__,
        parts=(list(PARTS), "which of them"),
        lives=(6, "pairs of engines of the cost, one pair after the other"),
        rounds=(4, "of each pair, each with and without"),
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
    rng, subjects = random.Random(options.seed), [Subject("without"), Subject("with")]
    written = entries = 0
    for life in range(options.lives):
        found = live(subjects, folder / str(life), more, rng, options)
        written, entries = written + found.written_bytes, entries + found.entries
    without, having = subjects
    pairs = (
        slice(life, life + options.rounds) for life in range(0, len(having.cpu), options.rounds)
    )
    more_cpu = [sum(having.cpu[pair]) / sum(without.cpu[pair]) - 1 for pair in pairs]
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
    print(f"written {written / 2**20:.0f} MiB, {entries} entries\n", flush=True)
    return median <= MOST_COST


def live(
    subjects: Sequence[Subject],
    folder: Path,
    more: dict[str, str],
    rng: random.Random,
    options: Namespace,
) -> StoreStats:
    """Start an engine of each kind, and measure their rounds. The store's counts at the end."""
    folder.mkdir()
    with ExitStack() as stack:
        running = []
        for subject in subjects:
            store = folder / "cost" if subject.name == "with" else None
            log = folder / f"{subject.name}.log"
            life = serving(free_port(), store, log, options.threads, more)
            running.append((subject, *stack.enter_context(life)))
        for _, server, client in running:
            run_round(Subject("warm"), server, client, texts_of(rng, options), options.clients)
        for number in range(options.rounds):
            texts = texts_of(rng, options)
            for subject, server, client in running if number % 2 else reversed(running):
                run_round(subject, server, client, texts, options.clients)
        found = running[1][2].stats().store
    assert found is not None
    return found


def texts_of(rng: random.Random, options: Namespace) -> list[str]:
    return [prompt_of(rng, options.words) for _ in range(options.turns)]


def run_round(
    subject: Subject, server: Server, client: Client, texts: list[str], clients: int
) -> None:
    cpu, began = cpu_seconds(server.pid), time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = pool.map(
            lambda text: client.ask(text, "bench", is_marked=True, max_tokens=ANSWER_TOKENS), texts
        )
        tokens = sum(one.started.usage.prompt_tokens + ANSWER_TOKENS for one in answers)
    subject.wall.append((time.monotonic() - began) / tokens)
    client.settle()
    subject.cpu.append((cpu_seconds(server.pid) - cpu) / tokens)


if __name__ == "__main__":
    sys.exit(main())
