"""What the store on disk costs and gives: throughput with and without, speed, and break-even.

1. Cost: prompts that nobody has sent before, each with a 1-hour breakpoint, go to a native engine
   without and to one with a store, in turn, several times. Nobody reads what is stored.
2. Speed: the disk's own bytes a second for files of a block's size, written and read one by one.
   The lines of 1 and 3 tell how much the store wrote and read.
3. Break-even: time to the first token of prompts of growing length, cold and, after a restart,
   read from the store.
"""

import os
import random
import statistics
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.faults.store import prompt_of, serving
from scripts.setup.options import parse
from scripts.stack import free_port

OWN_FILES = 512
FILE_BYTES = 65_536


def main() -> int:
    options = parse(
        __doc__,
        rounds=(5, "measurements with and without"),
        turns=(24, "prompts of each"),
        words=(400, "words of a prompt"),
        clients=(4, "prompts at one time"),
        lengths=([100, 250, 500, 1000, 2000, 4000], "words of the prompts of the break-even"),
        threads=(2, "CPU threads of the engine"),
        seed=1,
    )
    rng = random.Random(options.seed)
    with TemporaryDirectory(prefix="store-") as directory:
        folder = Path(directory)
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(options.rounds):
            for has_store in (False, True) if number % 2 else (True, False):
                store = folder / f"store-{number}" if has_store else None
                rate = throughput(folder, store, options, rng)
                rates[has_store].append(rate)
                print(f"round {number + 1}, store {has_store}: {rate:.0f} tokens/s", flush=True)
        without, having = (statistics.median(rates[has_store]) for has_store in (False, True))
        print(
            f"\n| | tokens/s, median |\n|---|---|\n| without | {without:.0f} |\n"
            f"| with | {having:.0f} ({having / without - 1:+.1%}) |\n"
        )
        tell_disk(folder)
        tell_break_even(folder, options, rng)
    return 0


def throughput(folder: Path, store: Path | None, options: Namespace, rng: random.Random) -> float:
    """Prompt and output tokens a second over a number of new prompts."""
    log = folder / "engine.log"
    with serving(free_port(), store, log, options.threads) as (_, client):
        client.ask(prompt_of(rng, 50), "warm", is_marked=True, max_tokens=4)
        prompts = [prompt_of(rng, options.words) for _ in range(options.turns)]
        began = time.monotonic()
        with ThreadPoolExecutor(options.clients) as pool:
            answers = list(
                pool.map(
                    lambda text: client.ask(text, "bench", is_marked=True, max_tokens=16), prompts
                )
            )
        seconds = time.monotonic() - began
        client.settle()
        found = client.stats().store
        if found is not None:
            print(f"  wrote {found.written_bytes / 2**20:.0f} MiB, {found.entries} entries stored")
    return sum(answer.started.usage.prompt_tokens + 16 for answer in answers) / seconds


def tell_disk(folder: Path) -> None:
    """The disk's own speed for files of a block's size."""
    data, place = os.urandom(FILE_BYTES), folder / "own"
    place.mkdir()
    began = time.monotonic()
    for number in range(OWN_FILES):
        (place / f"{number}.new").write_bytes(data)
        os.replace(place / f"{number}.new", place / str(number))
    os.sync()
    written = time.monotonic() - began
    began = time.monotonic()
    for number in range(OWN_FILES):
        with open(place / str(number), "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.read()
    read = time.monotonic() - began
    total = OWN_FILES * FILE_BYTES / 2**20
    print(
        f"the disk's own, files of 64 KiB: {total / written:.0f} MiB/s written and synced, ", end=""
    )
    print(f"{total / read:.0f} MiB/s read")


def tell_break_even(folder: Path, options: Namespace, rng: random.Random) -> None:
    lengths, threads = options.lengths, int(options.threads)
    store, log = folder / "store-lengths", folder / "engine.log"
    texts = [prompt_of(rng, words) for words in lengths]
    with serving(free_port(), store, log, threads) as (_, client):
        cold = [client.ask(text, "even", is_marked=True, max_tokens=1) for text in texts]
        client.settle()
    with serving(free_port(), store, log, threads) as (_, client):
        before = client.stats().store
        began = time.monotonic()
        stored = [client.ask(text, "even", is_marked=True, max_tokens=1) for text in texts]
        seconds = time.monotonic() - began
        after = client.stats().store
    assert before is not None and after is not None
    print("\n| prompt tokens | cold | from the store | tokens read |\n|---|---|---|---|")
    for one, other in zip(cold, stored, strict=True):
        usage = other.started.usage
        print(
            f"| {usage.prompt_tokens} | {one.seconds_to_first:.3f} s "
            f"| {other.seconds_to_first:.3f} s | {usage.cache_read_tokens} |"
        )
    mebibytes = (after.read_bytes - before.read_bytes) / 2**20
    print(f"\nread {mebibytes:.0f} MiB in {seconds:.2f} s of turns")


if __name__ == "__main__":
    sys.exit(main())
