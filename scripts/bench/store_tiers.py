"""From which length of a prompt on its keys and values are sooner loaded than computed."""

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from scripts.bench.report import table
from scripts.faults.store import Answer, Client, prompt_of, serving
from scripts.stack import free_port

FLOOD_WORDS = 900
POOL_TOKENS = 6144
BLOCK = 16
WAIT_SECONDS = 120.0
TIERS = ("cold", "device", "host", "store", "member")


@dataclass
class Times:
    """Seconds to the first token by words of the prompt. `tokens` are the prompts'."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def take(self, words: int, answer: Answer, *, least_reused: float) -> None:
        """Raises RuntimeError where less of the prompt was reused than this share."""
        usage = answer.started.usage
        reused = usage.cache_read_tokens + usage.automatic_tokens
        if reused < least_reused * usage.prompt_tokens - BLOCK:
            raise RuntimeError(f"{reused} of {usage.prompt_tokens} tokens were reused")
        self.seconds.setdefault(words, []).append(answer.seconds_to_first)
        self.tokens[words] = usage.prompt_tokens


class BreakEven:
    def __init__(self, folder: Path, more: dict[str, str], options: Namespace) -> None:
        self._folder = folder
        self._more = {**more, "ENGINE_STORE_BYTES_PER_SECOND": str(2**30)}
        self._threads: int = options.threads
        self._rng = random.Random(options.seed)
        self._texts = [
            (words, prompt_of(self._rng, words))
            for words in options.lengths
            for _ in range(options.repeats)
        ]
        self.times = {tier: Times() for tier in TIERS}

    def run(self) -> None:
        self._host()
        shared = {"ENGINE_STORE_SHARED": "true"}
        with ExitStack() as stack:
            client = self._enter(stack, shared)
            self._ask_all(client, "cold", least_reused=0)
            self._ask_all(client, "device", least_reused=1)
            client.settle()
            other = self._enter(stack, shared)
            wait_for(other, len(self._texts))
            self._ask_all(other, "member", least_reused=1)
        with ExitStack() as stack:
            client = self._enter(stack, shared)
            wait_for(client, len(self._texts))
            self._ask_all(client, "store", least_reused=1)

    def _enter(self, stack: ExitStack, settings: dict[str, str]) -> Client:
        store, log = self._folder / "even", self._folder / "even.log"
        life = serving(free_port(), store, log, self._threads, {**self._more, **settings})
        client = stack.enter_context(life)[1]
        client.ask(prompt_of(self._rng, 50), "warm", is_marked=False, max_tokens=4)
        return client

    def _ask_all(self, client: Client, tier: str, *, least_reused: float) -> None:
        for words, text in self._texts:
            answer = client.ask(text, "even", is_marked=True, max_tokens=1)
            self.times[tier].take(words, answer, least_reused=least_reused)

    def _host(self) -> None:
        """Unmarked prompts that others have pushed out of the device's pool."""
        blocks = {"ENGINE_NUM_BLOCKS": str(POOL_TOKENS // BLOCK), "ENGINE_HOST_BLOCKS": "8192"}
        log = self._folder / "host.log"
        more = {**self._more, **blocks}
        with serving(free_port(), None, log, self._threads, more) as (_, client):
            num_floods = POOL_TOKENS // FLOOD_WORDS + 2
            floods = (prompt_of(self._rng, FLOOD_WORDS) for _ in range(num_floods))
            for text in [*(text for _, text in self._texts), *floods]:
                client.ask(text, "host", is_marked=False, max_tokens=1)
            for words, text in self._texts:
                before = client.stats().counters.promoted_blocks
                answer = client.ask(text, "host", is_marked=False, max_tokens=1)
                promoted = client.stats().counters.promoted_blocks - before
                usage = answer.started.usage
                if promoted < usage.prompt_tokens // BLOCK - 1:
                    raise RuntimeError(f"{promoted} blocks came from the host")
                self.times["host"].take(words, answer, least_reused=1)


def wait_for(client: Client, count: int) -> None:
    """Until the engine knows this many entries."""
    end = time.monotonic() + WAIT_SECONDS
    while len(client.entries()) < count:
        if time.monotonic() > end:
            raise RuntimeError(f"{len(client.entries())} entries of {count}")
        time.sleep(0.2)


def tell_break_even(folder: Path, more: dict[str, str], options: Namespace) -> None:
    bench = BreakEven(folder, more, options)
    bench.run()
    cold = bench.times["cold"]
    medians = {
        tier: {words: statistics.median(found) for words, found in times.seconds.items()}
        for tier, times in bench.times.items()
    }
    rows = [
        [str(cold.tokens[words]), *(f"{medians[tier][words] * 1e3:.1f}" for tier in TIERS)]
        for words in options.lengths
    ]
    print(table(["prompt tokens, ms to the first", *TIERS], rows))
    for tier in TIERS[1:]:
        sooner = (words for words in options.lengths if _is_sooner(medians, tier, words, options))
        least = next(iter(sooner), None)
        told = "no length measured" if least is None else f"{cold.tokens[least]} tokens on"
        print(f"loading from {tier} is sooner from {told}", flush=True)


def _is_sooner(
    medians: dict[str, dict[int, float]], tier: str, words: int, options: Namespace
) -> bool:
    """Whether loading is sooner at this length and at all longer ones."""
    longer: Iterable[int] = (one for one in options.lengths if one >= words)
    return all(medians[tier][one] < medians["cold"][one] for one in longer)
