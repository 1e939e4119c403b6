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
*ceiling* is the share that one infinite cache would have reused of the prompts that were sent, by
whole blocks. *load* is tokens prefilled and decoded by an engine, max/mean. Times to the first
token are the client's.
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

from scripts.bench.load import CHAT
from scripts.bench.report import percentile, table
from scripts.bench.routers import PEERS_PYTHON, install, rust_router
from scripts.bench.routing_load import (
    BLOCK_TOKENS,
    REQUEST_SECONDS,
    SHAPES,
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
class Subject:
    """Ours, or somebody else's `router` with its policy.

    What marks nothing at ours gets leases where `leases`.
    """

    router: str = ""
    policy: str = "cache_aware"
    is_marked: bool = False
    leases: bool = True

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[tuple[str, str]]:
        """Its URL and its key. Raises StartError where it ends or does not get ready."""
        log = folder / "subject.log"
        if not self.router:
            settings = {"HOLDFAST_LOG_LEVEL": "warning"}
            settings |= {} if self.leases else {"HOLDFAST_AUTO_CACHE": "off"}
            with serving_gateway(folder / "data", engines, settings, log) as server:
                yield server.wait().url, API_KEY
            return
        router = rust_router(self.router, engines, self.policy, key=ENGINE_SECRET)
        with serving(router.command, router.environment, router.port, log=log) as server:
            url, key = server.url, router.key
            wait_for(lambda: _passes_on(url, key), server.process, log)
            yield url, key


def _passes_on(url: str, key: str) -> Readiness:
    """Whether a request gets through: some routers listen before they know their workers."""
    try:
        answer = _asked(url, key, ["hi", "there"], 20)
    except httpx.TransportError as error:
        return Readiness(False, repr(error))
    return Readiness(answer.status_code == 200, answer.text[:200])


def _asked(url: str, key: str, texts: list[str], timeout: float) -> httpx.Response:
    body = body_of_talk(texts, 1, is_marked=False)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{url}{CHAT}", json=body, headers=headers, timeout=timeout)


SUBJECTS = {
    "ours, events": Subject(),
    "ours, events, marked": Subject(is_marked=True),
    "ours, events, no leases": Subject(leases=False),
    "sglang-router": Subject("sglang-router"),
    "vllm-router": Subject("vllm-router"),
    "smg": Subject("smg"),
    "round robin": Subject("sglang-router", "round_robin"),
}


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
    if any(SUBJECTS[name].router for name in names) and not PEERS_PYTHON.exists():
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
            turn = number % len(names)  # nobody always comes first
            turns = names[turn:] + names[:turn]
            rows = [[name, *_measure(SUBJECTS[name], workload, num_blocks)] for name in turns]
            print(table(HEADINGS, rows), flush=True)
    return 0


def _measure(subject: Subject, workload: Workload, num_blocks: int) -> list[str]:
    """A row of figures: sums of the engines' counters, in tokens, and what the client saw."""
    settings = {"ENGINE_NUM_BLOCKS": str(num_blocks), "ENGINE_LOG_LEVEL": "warning"}
    module = "scripts.bench.openai_engine"
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as name, ExitStack() as stack:
        folder = Path(name)
        logs = [folder / f"engine-{number}.log" for number in range(NUM_ENGINES)]
        engines = [
            stack.enter_context(serving_engine("synthetic", settings, log, module=module))
            for log in logs
        ]
        urls = [engine.wait().url for engine in engines]
        url, key = stack.enter_context(subject.running(urls, folder))
        # Long prompts at once, so that processes that start by need have started.
        with ThreadPoolExecutor(NUM_WARM) as threads:
            texts = ([f"warm {number} " * WARM_WORDS, "go on"] for number in range(NUM_WARM))
            warmed = threads.map(lambda two: _asked(url, key, two, REQUEST_SECONDS), texts)
            for answer in warmed:
                answer.raise_for_status()
        before = _counters(urls)
        seen = asyncio.run(run_load(workload, url, key, is_marked=subject.is_marked))
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
    ceiling = ceiling_of(seen.prompts)
    hit = (prompt - computed) / prompt
    loads = [one["computed_tokens"] + one["output_tokens"] for one in grown]
    print("".join(f"    {error}\n" for error in seen.errors[:2]), end="")
    return [
        f"{hit:.4f}",
        f"{hit * ceiling.prompt / ceiling.reused:.2%}",
        f"{computed:,}",
        f"{max(loads) / statistics.fmean(loads):.3f}",
        *(f"{1e3 * percentile(seen.first_token, share):.0f}ms" for share in (0.5, 0.95)),
        f"{len(seen.first_token) / seen.seconds:.1f}",
        str(len(seen.errors)),
    ]


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
        f"{room:.0%} of that together\nceiling {data.reused / data.prompt:.4f}; "
        f"{workload.in_flight} in flight, {workload.max_tokens} tokens answered"
    )
    return num_blocks


if __name__ == "__main__":
    sys.exit(main())
