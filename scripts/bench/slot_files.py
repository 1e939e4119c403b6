"""What leases in llama.cpp's slot files save, and what a save costs other clients, as a table.

    python -m scripts.bench.slot_files [--tokens 500 2400 6000] [--rounds 3]

`scripts.setup.llamacpp_tests` builds the server and the model if they are missing. All times are
medians of seconds until an answer begins, measured at the engine without a gateway. Only a quiet
machine gives useful figures.
"""

import os
import statistics
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.protocol import Ttl
from scripts.bench.report import machine_line, markdown
from scripts.setup.llamacpp_tests import where_all_is
from tests.conformance.engines import Engine, prompt
from tests.engine.backends.upstream.slots.real import SMOLLM2, Real, engine_of, serving

NUM_SLOTS = 4
OTHERS_TOKENS = 2000
COLUMNS = (
    "tokens of the mark",
    "cold, unmarked",
    "cold and saved",
    "restored",
    "warm",
    "file, MB",
    "another's longest pause: a save",
    "a restore",
    "neither",
)


@dataclass
class Row:
    """Seconds of each round. `pauses` are the pauses of another client's stream."""

    tokens: int = 0
    num_bytes: int = 0
    unmarked: list[float] = field(default_factory=list)
    saved: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    save_pauses: list[float] = field(default_factory=list)
    restore_pauses: list[float] = field(default_factory=list)
    calm_pauses: list[float] = field(default_factory=list)

    def cells(self) -> list[str]:
        times = (self.unmarked, self.saved, self.restored, self.warm)
        pauses = (self.save_pauses, self.restore_pauses, self.calm_pauses)
        return [
            f"{self.tokens:,}",
            *(f"{statistics.median(seconds):.2f} s" for seconds in times),
            f"{self.num_bytes / 1e6:.1f}",
            *(f"{statistics.median(seconds) * 1000:.0f} ms" for seconds in pauses),
        ]


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="python -m scripts.bench.slot_files", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2400, 6000])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ |= where_all_is()
    rows = measured(options.tokens, options.rounds)
    print(f"{machine_line()}, {_processor()}, load {os.getloadavg()[0]:.1f}\n")
    print(markdown(COLUMNS, [row.cells() for row in rows]))
    return 0


def measured(lengths: list[int], rounds: int) -> list[Row]:
    """A row for each length in tokens."""
    rows = list[Row]()
    with TemporaryDirectory(prefix="slot-files-") as root:
        real = Real(Path(root, "slots"), SMOLLM2, NUM_SLOTS)
        with serving(real), engine_of(real) as engine:
            for length in lengths:
                meter = _Meter(engine, real.folder, Row())
                for _ in range(rounds):
                    meter.measure(length)
                rows.append(meter.row)
    return rows


class _Meter:
    def __init__(self, engine: Engine, folder: Path, row: Row) -> None:
        self._engine = engine
        self._folder = folder
        self.row = row

    def measure(self, length: int) -> None:
        engine = self._engine
        row = self.row
        row.unmarked.append(self._seconds(engine.text(length), engine.scope(), is_marked=False))
        scope = engine.scope()
        shared = engine.text(length)
        before = set(self._folder.glob("hf-*.bin"))
        row.saved.append(self._seconds(shared, scope))
        (file,) = set(self._folder.glob("hf-*.bin")) - before
        row.num_bytes = file.stat().st_size
        row.tokens = engine.entries(scope)[0].tokens
        self._flood()
        row.restored.append(self._seconds(shared, scope))
        row.warm.append(self._seconds(shared, scope))
        # Beside another answer the server saves tokens that the slot has already, and restores
        # them.
        other_text = engine.text(length)
        self._seconds(other_text, scope, is_marked=False)
        row.save_pauses.append(self._pause(lambda: self._seconds(other_text, scope)))
        self._flood()
        row.restore_pauses.append(self._pause(lambda: self._seconds(other_text, scope)))
        row.calm_pauses.append(self._pause(lambda: time.sleep(1.0)))
        engine.drop(scope)

    def _seconds(self, shared: str, scope: str, *, is_marked: bool = True) -> float:
        """The seconds until an answer to a prompt begins."""
        marks: list[tuple[int, Ttl]] = [(0, "1h")] if is_marked else []
        request = self._engine.request(prompt(shared, self._engine.text(8)), scope, *marks)
        since = time.monotonic()
        with self._engine.stream(request) as stream:
            stream.start()
            seconds = time.monotonic() - since
            stream.rest()
        return seconds

    def _flood(self) -> None:
        """Let other workspaces use every slot."""
        for _ in range(2 * NUM_SLOTS):
            self._engine.ask(prompt(self._engine.text(20)), self._engine.scope())

    def _pause(self, work: Callable[[], object]) -> float:
        """The longest time between two frames of another workspace's answer while `work` runs."""
        engine = self._engine
        other_prompt = prompt(engine.text(20))
        request = engine.request(
            other_prompt, engine.scope(), max_tokens=OTHERS_TOKENS, ignore_eos=True
        )
        times = list[float]()
        begun = threading.Event()
        is_done = threading.Event()

        def listen() -> None:
            try:
                with engine.stream(request) as stream:
                    for _ in stream.frames:
                        times.append(time.monotonic())
                        if len(times) > 8:
                            begun.set()
                        if is_done.is_set():
                            return
            finally:
                begun.set()

        with ThreadPoolExecutor(1) as pool:
            listening = pool.submit(listen)
            begun.wait()
            first = len(times) - 1
            work()
            is_done.set()
            listening.result()
        frame_times = times[first:]
        return max(after - before for before, after in pairwise(frame_times))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "a processor that tells no name")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
