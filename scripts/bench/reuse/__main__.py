"""What share of prompt tokens an order of reuse reads in tight memory.

    python -m scripts.bench.reuse --traces DIR [--only agents …] [--before CHECKOUT]

Traffic of one workspace is replayed through the engine's prefix cache (pool, entries, leases): no
model, one request at a time, a virtual clock. `marked`: every prompt has a client's mark of 5
minutes at its end. `unmarked`: every prompt has an automatic one there. `off`: none has one.
Prompts of fewer than 1,024 tokens get no entry, and are a row of their own too. Beside it stand
plain LRU over the same memory, and Belady's bound, which knows the future.

*starved*: short prompts before and after 14 chats that never come back. *flooded*: conversations
with a part of the memory between two turns. *strangers*: short prompts among many such chats.
*tenants*, *parting*, *sessions*: the conversations of scripts.simulate, in an eighth and a quarter
of the memory that would hold them all. *conversations*: Mooncake's trace. *agents*: sessions of
coding agents. DIR has the last two as `conversation_trace.jsonl` and `agentic/trace_NNNN.json`;
README.md of scripts/bench says where they are to be had. Without DIR the others are replayed.

With `--file FILE --block-tokens N` it is one's own traffic that is replayed: FILE is what
`python -m gateway trace --block-tokens N` printed, or any trace in Mooncake's format. Without sizes
of memory an eighth, a quarter and a half of all blocks are taken.

With `--before` the same is replayed by the engine of another checkout that has this benchmark. Its
figures stand in columns of their own.
"""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from scripts.bench.report import machine_line, table
from scripts.bench.reuse.engine_replay import replay_engine
from scripts.bench.reuse.models import Reads, replay_belady, replay_lru
from scripts.bench.reuse.traces import SIZES, Trace, TraceMissing, load
from scripts.setup.options import parse

MODELS = ("lru", "belady")
ENGINE = ("unmarked", "marked", "off")
PUBLIC = ("conversations", "agents")
NO_ROW = ("long", "chats")
"""Groups without a row of their own."""


class Job(msgspec.Struct, frozen=True):
    trace: str
    blocks: int
    order: str
    folder: Path
    # The tokens of a block in your own trace; 0 for the other traces.
    block_tokens: int = 0


class Figure(msgspec.Struct, frozen=True):
    """What one order read of a trace in one memory."""

    trace: str
    blocks: int
    order: str
    # The share of prompt tokens that were read.
    share: float
    # The same share by group.
    groups: dict[str, float]
    # Prompts that do not fit into the memory. No other count has them.
    refused: int


def main() -> int:
    options = parse(
        __doc__,
        traces=(Path, "folder of the public traces"),
        file=(Path, "one's own traffic, in Mooncake's format"),
        block_tokens=(512, "tokens of a block of that file"),
        only=([""], "traces to replay", [*SIZES]),
        blocks=([0], "sizes of memory, in blocks"),
        orders=(["lru", "unmarked", "marked", "belady"], None, [*MODELS, *ENGINE]),
        before=(Path, "checkout whose engine is compared"),
        workers=(2, "processes at the same time"),
        json=(False, "print figures as lines of JSON"),
    )
    names = [name for name in options.only if name]
    if not names:
        names = [name for name in SIZES if name not in PUBLIC or options.traces is not None]
    folder = (options.traces or Path()).resolve()
    wanted_sizes = [size for size in options.blocks if size]
    block_tokens = 0
    if options.file is not None:
        names = [options.file.name]
        folder = options.file.resolve()
        block_tokens = options.block_tokens
    jobs = []
    began = time.perf_counter()
    try:
        for name in names:
            trace = load(name, folder, block_tokens)
            sizes = wanted_sizes or SIZES.get(name) or parts_of(trace)
            for blocks in sizes:
                jobs += [Job(name, blocks, order, folder, block_tokens) for order in options.orders]
        figures = list(measure(jobs, options.workers))
        before = []
        if options.before is not None and not block_tokens:
            theirs = [job for job in jobs if job.order in ENGINE]
            before = measure_before(theirs, options.workers, options.before)
    except (TraceMissing, subprocess.CalledProcessError) as error:
        print(f"reuse: {error}", file=sys.stderr)
        return 1
    if options.json:
        for figure in figures:
            print(msgspec.json.encode(figure).decode())
        return 0
    print_table(figures, before)
    print(f"\n{machine_line()}; {time.perf_counter() - began:.0f} s")
    return 0


def parts_of(trace: Trace) -> list[int]:
    """An eighth, a quarter and a half of the blocks that would hold all of a trace."""
    blocks = set[int]().union(*(request.blocks for request in trace.requests))
    return sorted({max(len(blocks) * part // 8, 1) for part in (1, 2, 4)})


def measure(jobs: Sequence[Job], num_workers: int) -> Iterator[Figure]:
    """The results of the jobs, in their order."""
    with ProcessPoolExecutor(num_workers) as workers:
        yield from workers.map(run, jobs)


def run(job: Job) -> Figure:
    trace = load(job.trace, job.folder, job.block_tokens)
    began = time.perf_counter()
    reads: Reads
    match job.order:
        case "lru":
            reads = replay_lru(trace, job.blocks)
        case "belady":
            reads = replay_belady(trace, job.blocks)
        case "unmarked" | "marked" | "off" as marks:
            reads = replay_engine(trace, job.blocks, marks)
        case _:
            raise AssertionError(job.order)
    took = time.perf_counter() - began
    label = f"{job.trace}, {job.blocks:,} blocks, {job.order}"
    print(f"{label}: {reads.share:.3f} in {took:.0f} s", file=sys.stderr, flush=True)
    groups = {group: reads.share_of(group) for group in sorted(reads.prompt)}
    return Figure(job.trace, job.blocks, job.order, reads.share, groups, reads.num_refused)


def measure_before(jobs: Sequence[Job], num_workers: int, checkout: Path) -> list[Figure]:
    """What this benchmark prints in another checkout. Raises CalledProcessError."""
    figures: list[Figure] = []
    decoder = msgspec.json.Decoder(Figure)
    for name in dict.fromkeys(job.trace for job in jobs):
        trace_jobs = [job for job in jobs if job.trace == name]
        sizes = dict.fromkeys(str(job.blocks) for job in trace_jobs)
        orders = dict.fromkeys(job.order for job in trace_jobs)
        command = [sys.executable, "-m", "scripts.bench.reuse", "--json", "--only", name]
        command += ["--traces", str(trace_jobs[0].folder), "--workers", str(num_workers)]
        command += ["--blocks", *sizes, "--orders", *orders]
        process = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, check=True)
        figures += map(decoder.decode, process.stdout.splitlines())
    return figures


def print_table(figures: Sequence[Figure], before: Sequence[Figure]) -> None:
    by_case = {(figure.trace, figure.blocks, figure.order): figure for figure in figures}
    by_case |= {
        (figure.trace, figure.blocks, f"{figure.order} before"): figure for figure in before
    }
    told_before = {figure.order for figure in before}
    columns: list[str] = []
    for order in dict.fromkeys(figure.order for figure in figures):
        columns += [f"{order} before", order] if order in told_before else [order]
    rows: list[list[str]] = []
    for name, blocks in dict.fromkeys((figure.trace, figure.blocks) for figure in figures):
        row = [by_case[name, blocks, column] for column in columns]
        shares = [f"{figure.share:.3f}" for figure in row]
        rows.append([name, f"{blocks:,}", "all", *shares, str(row[0].refused)])
        for group in row[0].groups:
            if group in NO_ROW:
                continue
            # Belady's order is best for all prompts together. It bounds no group of them.
            shares = [
                "" if figure.order == "belady" else f"{figure.groups[group]:.3f}" for figure in row
            ]
            rows.append(["", "", group, *shares, ""])
    print(table(["trace", "blocks", "prompts", *columns, "refused"], rows))


if __name__ == "__main__":
    sys.exit(main())
