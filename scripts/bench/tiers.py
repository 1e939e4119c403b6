"""Does bringing a prefix back from host memory hold up those who decode?

One request answers without a pause while another asks again for a prefix that a flood has pushed
out of the device's pool. A row is printed for each bound on the bytes that a step may copy, and one
for an engine without a host tier, which computes the prefix again. A row has the longest pause of
the first request's answer while the prefix comes, its longest pause with nothing else going on, and
the time until the second request's answer begins. The engine runs in this process over a
Llama-style model with random weights.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from engine.backends.looped import LoopedBackend
from engine.protocol import GenerateRequest, Started, Stats, TextDelta
from engine.settings import Settings
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
from scripts.bench.report import table_of
from scripts.setup.options import parse

MIB = 2**20


@dataclass(frozen=True, slots=True)
class TierRun:
    """`quiet_gap`, `busy_gap`: the reader's longest pause before and while the prefix came."""

    name: str
    quiet_gap: float
    busy_gap: float
    again: EngineAnswer
    stats: Stats


class Reader:
    """An answer that goes on and on; `times` are when its pieces came."""

    def __init__(self, backend: LoopedBackend, request: GenerateRequest) -> None:
        self._backend = backend
        self._request = request
        self.times: list[float] = []
        self.has_begun = asyncio.Event()

    async def run(self) -> None:
        async for frame in await self._backend.open(self._request):
            if isinstance(frame, Started):
                self.has_begun.set()
            if isinstance(frame, TextDelta):
                self.times.append(time.perf_counter())

    def longest_gap(self, begin: float, end: float) -> float:
        """Of the pauses that touch this stretch of time."""
        gaps = [later - one for one, later in pairwise(self.times) if later > begin and one < end]
        return max(gaps, default=float("nan"))


def main() -> int:
    options = parse(__doc__, prefix=8192, mib=[1.0, 4.0, 64.0, 1024.0], **MODEL_OPTIONS)
    with bench_model(options.hidden, options.layers, 2 * options.prefix) as model:
        print(f"prefix {options.prefix} tokens")
        sizes = [*options.mib, None]
        report([asyncio.run(measure(model, options.prefix, mib)) for mib in sizes])
    return 0


def settings_of(model: str, prefix: int, mib: float | None) -> Settings:
    num_blocks = 3 * prefix // BLOCK_SIZE // 2
    return new_settings(
        model=model,
        num_blocks=num_blocks,
        host_blocks=4 * num_blocks if mib is not None else 0,
        copy_bytes_per_step=int((mib or 1) * MIB),
    )


async def measure(model: RandomModel, prefix: int, mib: float | None) -> TierRun:
    async with running_backend(settings_of(str(model.path), prefix, mib)) as backend:

        def text(label: str) -> str:
            return text_of_tokens(model.count, label, prefix)

        def request(name: str, system: str, max_tokens: int) -> GenerateRequest:
            return new_request(
                name, system, "What?", max_tokens=max_tokens, is_marked=False, ignore_eos=True
            )

        kept = text("The prefix")
        await ask(backend, request("first", kept, 1))
        for index in range(2):
            await ask(backend, request(f"flood {index}", text(f"Flood {index}"), 1))
        reader = Reader(backend, request("reader", "Short.", 100_000))
        reading = asyncio.create_task(reader.run())
        await reader.has_begun.wait()
        await asyncio.sleep(1.0)
        begun = time.perf_counter()
        await asyncio.sleep(3.0)
        asked = time.perf_counter()
        again = await ask(backend, request("again", kept, 1))
        ended = time.perf_counter()
        await asyncio.sleep(0.5)
        await backend.cancel("reader")
        await reading
        name = "none: computed again" if mib is None else f"{mib:g} MiB a step"
        stats = await backend.stats()
        quiet, busy = reader.longest_gap(begun, asked), reader.longest_gap(asked, ended)
        return TierRun(name, quiet, busy, again, stats)


def report(outcomes: list[TierRun]) -> None:
    columns: dict[str, str | Callable[[TierRun], str]] = {
        "host tier": "{.name}",
        "quiet gap ms": lambda one: f"{one.quiet_gap * 1e3:.1f}",
        "longest gap ms": lambda one: f"{one.busy_gap * 1e3:.1f}",
        "first token s": "{.again.first_seconds:.3f}",
        "reused": "{.again.usage.automatic_tokens:,}",
        "computed": "{.again.usage.computed_tokens:,}",
        "blocks brought back": "{.stats.counters.promoted_blocks:,}",
    }
    print(table_of(outcomes, columns))


if __name__ == "__main__":
    sys.exit(main())
