"""Time of the native engine's step on a CPU: by its kernel in C++, and by torch's own functions.

Makes a Llama-style model with random weights (`common.py`) and runs the runner alone, without
scheduler and HTTP: decoding steps of some sequences behind a context each, with and without a
shared prefix, and chunks of a prompt. Both ways of attention take turns round by round, so that
what else runs on the machine meets both. Times are CPU seconds of this process's threads. A second
table tells where a step's CPU time goes: linear layers, attention, draws, the rest (norms, rotary
embedding, Python). A profile by torch's own profiler names the operations that take most.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from engine.compute import runner as engine_runner
from engine.compute.attention.cpu_kernel import CpuKernel
from engine.compute.loading import load_model
from engine.compute.runner import TorchRunner
from engine.schedule.runner import SampleParams, Work
from scripts.bench.common import BLOCK_SIZE, MODEL_OPTIONS, bench_model
from scripts.bench.report import table
from scripts.setup.options import parse

GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
SAMPLED = SampleParams(temperature=1, top_p=0.9, top_k=0, seed=0)
PREFILL = 256
PARTS = ("linear layers", "attention", "draws")


@dataclass(frozen=True, slots=True)
class Shape:
    """`shared` of the `context` tokens before each sequence are the same for all."""

    sequences: int
    context: int
    new: int = 1
    shared: int = 0

    def __str__(self) -> str:
        name = "decode" if self.new == 1 else f"prefill of {self.new}"
        behind = f"{self.context}" + (f", {self.shared} of them shared" if self.shared else "")
        return f"{name}, {self.sequences} x {behind}"

    def works(self) -> list[Work]:
        common = list(range(self.shared // BLOCK_SIZE))
        own = -(-(self.context + self.new) // BLOCK_SIZE) - len(common)
        return [
            Work(
                token_ids=[(7 * index + place) % 500 for place in range(self.new)],
                start=self.context,
                block_table=[
                    *common,
                    *range(len(common) + index * own, len(common) + (index + 1) * own),
                ],
                sample=GREEDY,
            )
            for index in range(self.sequences)
        ]

    @property
    def blocks(self) -> int:
        return max(block for work in self.works() for block in work.block_table) + 1


def shapes(most: int) -> list[Shape]:
    contexts = [tokens for tokens in (256, 1024, 4096) if tokens <= most]
    decodes = [Shape(number, context) for number in (1, 8, 32) for context in contexts]
    prefills = [Shape(1, context, new=PREFILL) for context in (0, *contexts)]
    return [*decodes, shared_shape(most), *prefills]


def shared_shape(most: int) -> Shape:
    return Shape(32, most // 2 + 100, shared=most // 2)


def main() -> int:
    options = parse(
        __doc__,
        **MODEL_OPTIONS,
        context=(4096, "longest context in tokens"),
        rounds=(8, "turns of each way of attention"),
        threads=(1, "of torch; several wait for each other, which is CPU time too"),
        profiled=(5, "steps in each profile; 0: no profile"),
    )
    todo = shapes(options.context)
    with bench_model(options.hidden, options.layers, options.context + PREFILL) as made:
        runners = new_runners(made.path, options.threads, max(shape.blocks for shape in todo))
        rows = [row_of(shape, runners, options.rounds) for shape in todo]
        print(f"\nmilliseconds of CPU a step, median of {options.rounds} rounds")
        print(table(["step", *runners, "ratio of rounds"], rows))
        parts = [part_row(shape, runners["cpp"], options.rounds) for shape in todo]
        print("\nmilliseconds of CPU a step with the kernel in C++, by what takes them")
        print(table(["step", *PARTS, "rest", "all"], parts))
        for shape in (todo[2 * len(todo) // 3], shared_shape(options.context), todo[-1]):
            for name, runner in runners.items():
                if options.profiled:
                    print(f"\n{shape}, {name}\n{profile_of(runner, shape, options.profiled)}")
    return 0


def new_runners(model: Path, threads: int, num_blocks: int) -> dict[str, TorchRunner]:
    """Each has a pool of its own, with numbers as a model's; the weights are the same."""
    compiled = load_model(str(model), attention="cpp", device="cpu", threads=threads)
    runners = {}
    for name, loaded in (("sdpa", replace(compiled, kernel=None)), ("cpp", compiled)):
        runners[name] = loaded.runner(num_blocks, BLOCK_SIZE)
        generator = torch.Generator().manual_seed(1)
        for tensor in (*runners[name].pool.keys, *runners[name].pool.values):
            tensor.normal_(generator=generator)
    return runners


def row_of(shape: Shape, runners: dict[str, TorchRunner], rounds: int) -> Sequence[str]:
    works = shape.works()
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, runner in runners.items():
            taken = cpu_seconds(partial(runner.execute, works))
            if number:  # the first warms up
                seconds[name].append(taken)
    ratios = [one / other for one, other in zip(*seconds.values(), strict=True)]
    medians = (f"{1000 * statistics.median(taken):.1f}" for taken in seconds.values())
    return [str(shape), *medians, f"{statistics.median(ratios):.2f}"]


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of a call, or of as many as take a tenth of a second, by call."""
    calls, begun = 0, time.process_time()
    while True:
        work()
        calls += 1
        taken = time.process_time() - begun
        if taken > 0.1:
            return taken / calls


def part_row(shape: Shape, runner: TorchRunner, rounds: int) -> Sequence[str]:
    """A step whose tokens are drawn at temperature 1, cut into parts by this thread's CPU time."""
    works = [replace(work, sample=SAMPLED) for work in shape.works()]
    runner.execute(works)
    taken: list[list[float]] = []
    for _ in range(rounds):
        spent = dict.fromkeys(PARTS, 0.0)
        with measured_parts(runner, spent):
            begun = time.thread_time()
            runner.execute(works)
            whole = time.thread_time() - begun
        taken.append([*spent.values(), whole - sum(spent.values()), whole])
    medians = [statistics.median(times) for times in zip(*taken, strict=True)]
    return [str(shape), *(f"{1000 * seconds:.1f}" for seconds in medians)]


@contextmanager
def measured_parts(runner: TorchRunner, spent: dict[str, float]) -> Iterator[None]:
    """Add up the CPU seconds of each of PARTS in `spent`."""

    def timed(part: str, work: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            begun = time.thread_time()
            result = work(*arguments, **named)
            spent[part] += time.thread_time() - begun
            return result

        return call

    with ExitStack() as stack:
        places: list[tuple[object, str, str]] = [(torch.nn.functional, "linear", PARTS[0])]
        places += [(CpuKernel, "_attend_rows", PARTS[1]), (engine_runner, "sample_rows", PARTS[2])]
        for owner, name, part in places:
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        yield


def profile_of(runner: TorchRunner, shape: Shape, steps: int) -> str:
    works = shape.works()
    with torch_profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            runner.execute(works)
    averages = profiler.key_averages()
    return str(
        averages.table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=40)
    )


if __name__ == "__main__":
    sys.exit(main())
