"""Prefix-aware routing, ours and other people's, on the same synthetic engines and workload.

    python -m scripts.bench.routing --install            the peers, into .venv-peers
    python -m scripts.bench.routing                      every subject, roomy and tight cache
    python -m scripts.bench.routing --only "smg" --cache tight --seeds 1 2
    python -m scripts.bench.routing --workload sessions --cache roomy quarter

Every run has fresh engines, in processes of their own: the real scheduler, pool and prefix cache
with a time model (50 us a prefilled token, one sequence after the other; 20 ms a decode step). They
speak plain OpenAI to peers and our protocol to our gateway. After 16 prompts that are not counted,
one client streams from whoever is measured, by /v1/chat/completions, closed loop. Subjects take
turns within each seed. What the workloads are stands in `routing_load.py`.

*hit* is the share of prompt tokens that the engines physically reused, by their own counters.
*ceiling* is the share that one infinite cache would have reused of the prompts that were sent: by
whole blocks, or to the token where the requests are marked, since an entry ends where its mark
stands. *load* is tokens prefilled and decoded by an engine, max/mean. Times to the first token are
the client's.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.bench.gateway_rig import PEERS_PYTHON, Router, install, rust_router
from scripts.bench.load import CHAT
from scripts.bench.report import percentile, table
from scripts.bench.routing_load import (
    BLOCK_TOKENS,
    REQUEST_SECONDS,
    SHAPES,
    Marks,
    Observed,
    Workload,
    body_of_talk,
    ceiling_of,
    run_load,
)
from scripts.setup.options import parse
from scripts.stack import (
    API_KEY,
    ENGINE_SECRET,
    Readiness,
    free_port,
    serving,
    serving_engine,
    serving_gateway,
    wait_for,
)

NUM_ENGINES = 4
NUM_WARM, WARM_WORDS = 16, 500
ROOM = {"roomy": 1.25, "quarter": 0.25, "tight": 0.2}
"""The fleet's memory over the data there is."""
HEADINGS = ("subject", "hit", "of ceiling", "prefilled", "load", "p50", "p95", "req/s", "errors")


@dataclass(frozen=True, slots=True)
class Ours:
    """`marks` are what the client sends. One that marks nothing gets leases where `leases`."""

    marks: Marks = "none"
    leases: bool = True

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
        """Its URL and its key."""
        settings = {"HOLDFAST_LOG_LEVEL": "warning"}
        settings |= {} if self.leases else {"HOLDFAST_AUTO_CACHE": "off"}
        log = folder / "gateway.log"
        with serving_gateway(folder / "data", engines, settings, log) as server:
            yield server.wait().url, API_KEY


@dataclass(frozen=True, slots=True)
class Peer:
    router: Router
    marks: Marks = "none"

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
        """Raises StartError where it ends or does not get ready."""
        port, log, key = free_port(), folder / "peer.log", self.router.key
        command = self.router.command(port, engines, folder)
        with serving(command, self.router.environment, port, log=log) as server:
            wait_for(lambda: _passes_on(server.url, key), server.process, log)
            yield server.url, key


def _passes_on(url: str, key: str) -> Readiness:
    """Whether a request gets through: some routers listen before they know their workers."""
    body = {"model": "synthetic", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=20)
    except httpx.TransportError as error:
        return Readiness(False, repr(error))
    return Readiness(answer.status_code == 200, answer.text[:200])


@contextmanager
def running_engines(number: int, num_blocks: int, folder: Path) -> Iterator[list[str]]:
    """Fresh synthetic engines: the defaults but for the pool's size."""
    settings = {"ENGINE_NUM_BLOCKS": str(num_blocks), "ENGINE_LOG_LEVEL": "warning"}
    module = "scripts.bench.openai_engine"
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                serving_engine("synthetic", settings, folder / f"engine-{i}.log", module=module)
            )
            for i in range(number)
        ]
        yield [server.wait().url for server in servers]


def _router(name: str, policy: str = "cache_aware") -> Peer:
    return Peer(rust_router(name, policy, key=ENGINE_SECRET))


SUBJECTS: dict[str, Ours | Peer] = {
    "ours, events": Ours(),
    "ours, events, marked": Ours("conversation"),
    "ours, events, no leases": Ours(leases=False),
    "sglang-router": _router("sglang-router"),
    "vllm-router": _router("vllm-router"),
    "smg": _router("smg"),
    "round robin": _router("sglang-router", "round_robin"),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Sums of the engines' counters, in tokens; `loads` by engine; what the client saw."""

    reused: int
    prompt: int
    loads: list[int]
    ceiling: float
    observed: Observed

    def cells(self) -> list[str]:
        times = [percentile(self.observed.first_token, share) for share in (0.5, 0.95)]
        return [
            f"{self.reused / self.prompt:.4f}",
            f"{self.reused / self.prompt / self.ceiling:.2%}",
            f"{self.prompt - self.reused:,}",
            f"{max(self.loads) / statistics.fmean(self.loads):.3f}",
            *(f"{1e3 * seconds:.0f}ms" for seconds in times),
            f"{len(self.observed.first_token) / self.observed.seconds:.1f}",
            str(len(self.observed.errors)),
        ]


def main() -> int:
    args = parse(
        __doc__,
        install=(False, "the peers, into .venv-peers"),
        only=([], "names of subjects; default: all"),
        cache=(["roomy", "tight"], None, list(ROOM)),
        seeds=[1, 2, 3],
        workload=("tenants", None, SHAPES),
        tenants=Workload().tenants,
        in_flight=Workload().in_flight,
        max_tokens=Workload().max_tokens,
    )
    if args.install:
        install()
        return 0
    names = args.only or list(SUBJECTS)
    if unknown := [name for name in names if name not in SUBJECTS]:
        print(f"no such subject: {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
        return 2
    if any(isinstance(SUBJECTS[name], Peer) for name in names) and not PEERS_PYTHON.exists():
        print("the peers are not installed: python -m scripts.bench.routing --install")
        return 2
    for cache in args.cache:
        for number, seed in enumerate(args.seeds):
            workload = Workload(
                tenants=args.tenants,
                in_flight=args.in_flight,
                max_tokens=args.max_tokens,
                seed=seed,
                shape=args.workload,
            )
            num_blocks = _num_blocks(workload, ROOM[cache], cache)
            turn, rows = number % len(names), []  # nobody always comes first
            for name in names[turn:] + names[:turn]:
                run = _measure(SUBJECTS[name], workload, num_blocks)
                rows.append([name, *run.cells()])
                print("".join(f"    {error}\n" for error in run.observed.errors[:2]), end="")
            print(table(HEADINGS, rows), flush=True)
    return 0


def _measure(subject: Ours | Peer, workload: Workload, num_blocks: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as name:
        folder = Path(name)
        with (
            running_engines(NUM_ENGINES, num_blocks, folder) as urls,
            subject.running(urls, folder) as (url, key),
        ):
            _warm(url, key)
            before = _counters(urls)
            observed = asyncio.run(run_load(workload, url, key, subject.marks))
            after = _counters(urls)
    grown = [
        {name: now[name] - then.get(name, 0) for name in now}
        for then, now in zip(before, after, strict=True)
    ]
    computed = sum(one["computed_tokens"] for one in grown)
    prompt = sum(
        count
        for one in grown
        for name, count in one.items()
        if name in ("input_tokens", "cache_read_tokens") or name.startswith("cache_write_")
    )
    ceiling = ceiling_of(observed.prompts)
    is_marked = isinstance(subject, Ours) and subject.marks != "none"
    return Run(
        reused=prompt - computed,
        prompt=prompt,
        loads=[one["computed_tokens"] + one["output_tokens"] for one in grown],
        ceiling=(ceiling.by_token if is_marked else ceiling.by_block) / ceiling.prompt,
        observed=observed,
    )


def _warm(url: str, key: str) -> None:
    """Send long prompts at once, so that processes that start by need have started."""
    headers = {"authorization": f"Bearer {key}"}

    def ask_once(number: int) -> None:
        body = body_of_talk([f"warm {number} " * WARM_WORDS, "go on"], "none", 1)
        answer = httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=REQUEST_SECONDS)
        answer.raise_for_status()

    with ThreadPoolExecutor(NUM_WARM) as threads:
        list(threads.map(ask_once, range(NUM_WARM)))


def _counters(urls: list[str]) -> list[dict[str, int]]:
    """Once nothing runs any more, so that all that was computed is counted."""
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    found = []
    for url in urls:
        while True:
            stats = httpx.get(f"{url}/v1/stats", headers=headers, timeout=30).json()
            if not stats["running"] and not stats["waiting"]:
                break
            time.sleep(0.05)
        found.append(stats["counters"])
    return found


def _num_blocks(workload: Workload, room: float, announce: str) -> int:
    """Blocks of one engine, from the data of the workload with answers as they will be."""
    answer = " ".join(["synthetic", *map(str, range(workload.max_tokens - 1))])
    prompts = []
    for system, questions in workload.scripts():
        texts = [system]
        for question in questions:
            texts.append(question)
            prompts.append(list(texts))
            texts.append(answer)
    data = ceiling_of(prompts)
    num_blocks = int(room * data.unique / NUM_ENGINES / BLOCK_TOKENS)
    print(
        f"\n{workload.shape}, {announce}, seed {workload.seed}: "
        f"{len(prompts):,} requests of {data.prompt:,} tokens, "
        f"{data.unique:,} different; {NUM_ENGINES} engines of {num_blocks * BLOCK_TOKENS:,}, "
        f"{room:.0%} of that together\nceiling {data.by_block / data.prompt:.4f} by blocks of "
        f"{BLOCK_TOKENS}, {data.by_token / data.prompt:.4f} to the token; "
        f"{workload.in_flight} in flight, {workload.max_tokens} tokens answered"
    )
    return num_blocks


if __name__ == "__main__":
    sys.exit(main())
