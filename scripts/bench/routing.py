"""Prefix-aware routing, ours and other people's, on the same synthetic engines and workload.

    python -m scripts.bench.routing --install            the peers, into .venv-peers
    python -m scripts.bench.routing                      every subject, roomy and tight cache
    python -m scripts.bench.routing --two-gateways       one gateway against two,
    python -m scripts.bench.routing --only "smg" --cache tight --seeds 1 2
    python -m scripts.bench.routing --workload parting --cache roomy
    python -m scripts.bench.routing --workload sessions --cache roomy quarter

Every run has fresh engines, in processes of their own: the real scheduler, pool and prefix cache
with a time model (50 us a prefilled token, one sequence after the other; 20 ms a decode step). They
speak plain OpenAI to peers and our protocol to our gateway. After 16 prompts that are not counted,
one client streams from whoever is measured, by /v1/chat/completions, closed loop. Subjects take
turns within each seed. What the workloads are stands in `routing_scripts.py`.

*hit* is the share of prompt tokens that the engines physically reused, by their own counters.
*ceiling* is the share that one infinite cache would have reused of the prompts that were sent: by
whole blocks, or to the token where the requests are marked, since an entry ends where its mark
stands. *load* is tokens prefilled and decoded by an engine, max/mean. Times to the first token are
the client's. *cpu* is how busy the machine was with anything but work of low priority; near 100 %
the times are waits for a CPU. *router* is the router's CPU per request.
"""

import argparse
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
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from scripts.bench.gateway_rig import PEERS_PYTHON, Router, install, litellm, rust_router
from scripts.bench.load import CHAT
from scripts.bench.report import percentile, table
from scripts.bench.routing_load import (
    BLOCK_TOKENS,
    REQUEST_SECONDS,
    SHAPES,
    Ceilings,
    Marks,
    Observed,
    Workload,
    body_of_talk,
    run_load,
)
from scripts.setup.options import parse
from scripts.stack import (
    API_KEY,
    ENGINE_SECRET,
    Process,
    Readiness,
    cpu_seconds,
    free_port,
    serving,
    serving_engine,
    serving_gateway,
    wait_for,
)


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """`urls` are asked in turn, with `key`; `processes` are what was started."""

    urls: list[str]
    key: str
    processes: list[Process]


@dataclass(frozen=True, slots=True)
class Ours:
    """`marks` are what the client sends, `events` whether routing follows the engines' events.

    A client that marks nothing gets leases by the gateway's policy where `leases`. There are
    `gateways` with a journal and a ledger each.
    """

    marks: Marks
    events: bool = True
    leases: bool = True
    gateways: int = 1
    is_ours: bool = True

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[RunningRouter]:
        settings = {
            "HOLDFAST_ROUTING_EVENTS": str(self.events).lower(),
            "HOLDFAST_LOG_LEVEL": "warning",
            **({} if self.leases else {"HOLDFAST_AUTO_CACHE": "off"}),
        }
        with ExitStack() as stack:
            servers = []
            for i in range(self.gateways):
                data, log = folder / f"data-{i}", folder / f"gateway-{i}.log"
                servers.append(stack.enter_context(serving_gateway(data, engines, settings, log)))
            urls = [server.wait().url for server in servers]
            yield RunningRouter(urls, API_KEY, [server.process for server in servers])


@dataclass(frozen=True, slots=True)
class Peer:
    router: Router
    marks: Marks = "none"
    is_ours: bool = False

    @contextmanager
    def running(self, engines: Sequence[str], folder: Path) -> Iterator[RunningRouter]:
        """Raises StartError where it ends or does not get ready."""
        port, log, key = free_port(), folder / "peer.log", self.router.key
        command = self.router.command(port, engines, folder)
        with serving(command, self.router.environment, port, log=log) as server:
            wait_for(lambda: _passes_on(server.url, key), server.process, log)
            yield RunningRouter([server.url], key, [server.process])


def _passes_on(url: str, key: str) -> Readiness:
    """Whether a request gets through: some routers listen before they know their workers."""
    body = {"model": "synthetic", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    headers = {"authorization": f"Bearer {key}"}
    try:
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=20)
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


def _litellm(marks: Marks = "none", **settings: object) -> Peer:
    return Peer(litellm("synthetic", key=ENGINE_SECRET, settings=settings), marks)


SUBJECTS: dict[str, Ours | Peer] = {
    "ours, events": Ours("none"),
    "ours, events, marked": Ours("conversation"),
    "ours, events, no leases": Ours("none", leases=False),
    "ours, learned": Ours("none", events=False),
    "ours, learned, marked": Ours("conversation", events=False),
    "sglang-router": _router("sglang-router"),
    "vllm-router": _router("vllm-router"),
    "smg": _router("smg"),
    "litellm": _litellm(),
    "litellm, prompt_caching": _litellm("system", optional_pre_call_checks=["prompt_caching"]),
    "round robin": _router("sglang-router", "round_robin"),
}
TWO_GATEWAYS: dict[str, Ours | Peer] = {
    "ours, events": Ours("none"),
    "ours, events, two gateways": Ours("none", gateways=2),
    "ours, events, marked": Ours("conversation"),
    "ours, events, marked, two gateways": Ours("conversation", gateways=2),
    "ours, learned": Ours("none", events=False),
    "ours, learned, two gateways": Ours("none", events=False, gateways=2),
}


NUM_ENGINES = 4
NUM_WARM, WARM_WORDS = 16, 500
ROOM = {"roomy": 1.25, "quarter": 0.25, "tight": 0.2}
"""The fleet's memory over the data there is."""
HEADINGS = (
    f"{'subject':36}{'hit':>8}{'of ceiling':>11}{'prefilled':>11}{'load':>7}"
    f"{'p50':>8}{'p95':>8}{'p99':>8}{'req/s':>7}{'errors':>7}{'cpu':>6}{'router':>9}"
)


@dataclass(frozen=True, slots=True)
class Engines:
    """Sums of the engines' counters over a run, in tokens; `loads` by engine."""

    reused: int
    prompt: int
    loads: list[int]

    @property
    def hit(self) -> float:
        return self.reused / self.prompt

    @property
    def imbalance(self) -> float:
        return max(self.loads) / statistics.fmean(self.loads)


@dataclass(frozen=True, slots=True)
class Run:
    """`busy` of the machine's CPUs, 0 to 1; `router_cpu` in seconds for each request."""

    engines: Engines
    ceiling: float
    observed: Observed
    busy: float
    router_cpu: float

    def percentile(self, share: float) -> float:
        return percentile(self.observed.first_token, share)

    def line(self, name: str) -> str:
        times = "".join(f"{1e3 * self.percentile(share):6.0f}ms" for share in (0.5, 0.95, 0.99))
        engines, num = self.engines, len(self.observed.first_token)
        return (
            f"{name:36}{engines.hit:8.4f}{engines.hit / self.ceiling:11.2%}"
            f"{engines.prompt - engines.reused:11,}{engines.imbalance:7.3f}{times}"
            f"{num / self.observed.seconds:7.1f}{len(self.observed.errors):7}{self.busy:6.0%}"
            f"{1e3 * self.router_cpu:7.2f}ms"
        )


def main() -> int:
    args = _arguments()
    if args.install:
        install()
        return 0
    known = TWO_GATEWAYS if args.two_gateways else SUBJECTS
    names = args.only or list(known)
    if unknown := [name for name in names if name not in known]:
        print(f"no such subject: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    if any(isinstance(known[name], Peer) for name in names) and not PEERS_PYTHON.exists():
        print("the peers are not installed: python -m scripts.bench.routing --install")
        return 2
    ceilings = Ceilings()
    for cache in args.cache:
        runs: dict[str, list[Run]] = {name: [] for name in names}
        for number, seed in enumerate(args.seeds):
            workload = Workload(
                tenants=args.tenants,
                in_flight=args.in_flight,
                max_tokens=args.max_tokens,
                seed=seed,
                shape=args.workload,
            )
            num_blocks = _num_blocks(workload, ROOM[cache], cache, ceilings)
            print(HEADINGS)
            # Nobody always comes first.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                runs[name].append(_measure(known[name], workload, num_blocks, ceilings))
                print(runs[name][-1].line(name), flush=True)
                for error in runs[name][-1].observed.errors[:2]:
                    print(f"    {error}")
        if len(args.seeds) > 1:
            _summarize(cache, runs)
    return 0


def _measure(subject: Ours | Peer, workload: Workload, num_blocks: int, ceilings: Ceilings) -> Run:
    with tempfile.TemporaryDirectory(prefix="bench-routing-") as name:
        folder = Path(name)
        with (
            running_engines(NUM_ENGINES, num_blocks, folder) as urls,
            subject.running(urls, folder) as router,
        ):
            _warm(router)
            before, cpu_before = _counters(urls), _cpu_seconds(router)
            machine = psutil.cpu_times()
            observed = asyncio.run(run_load(workload, router.urls, router.key, subject.marks))
            busy = _busy(machine)
            spent = _cpu_seconds(router) - cpu_before
            engines = _engines(before, _counters(urls))
    ceiling = ceilings.of(observed.prompts)
    marked = subject.is_ours and subject.marks != "none"
    return Run(
        engines=engines,
        ceiling=(ceiling.by_token if marked else ceiling.by_block) / ceiling.prompt,
        observed=observed,
        busy=busy,
        router_cpu=spent / max(len(observed.prompts), 1),
    )


def _warm(router: RunningRouter) -> None:
    """Send long prompts at once, so that processes that start by need have started."""
    headers = {"authorization": f"Bearer {router.key}"}

    def ask_once(number: int) -> None:
        url = router.urls[number % len(router.urls)]
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


def _engines(before: list[dict[str, int]], after: list[dict[str, int]]) -> Engines:
    grown = [
        {name: now[name] - then.get(name, 0) for name in now}
        for then, now in zip(before, after, strict=True)
    ]
    computed = sum(one["computed_tokens"] for one in grown)
    kinds = ("input", "cache_read", "cache_write_5m", "cache_write_1h")
    prompt = sum(one[f"{kind}_tokens"] for one in grown for kind in kinds)
    loads = [one["computed_tokens"] + one["output_tokens"] for one in grown]
    return Engines(reused=prompt - computed, prompt=prompt, loads=loads)


def _cpu_seconds(router: RunningRouter) -> float:
    return sum(cpu_seconds(process.pid) for process in router.processes)


def _busy(before: Any) -> float:
    """What the machine did besides idling and work of low priority, which gives way."""
    after = psutil.cpu_times()
    rest = sum(getattr(after, name) - getattr(before, name) for name in ("idle", "iowait", "nice"))
    return 1 - float(rest) / max(float(sum(after) - sum(before)), 1e-9)


def _num_blocks(workload: Workload, room: float, announce: str, ceilings: Ceilings) -> int:
    """Blocks of one engine, from the data of the workload with answers as they will be."""
    answer = " ".join(["synthetic", *map(str, range(workload.max_tokens - 1))])
    prompts = []
    for system, questions in workload.scripts():
        texts = [system]
        for question in questions:
            texts.append(question)
            prompts.append(list(texts))
            texts.append(answer)
    data = ceilings.of(prompts)
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


def _summarize(cache: str, runs: dict[str, list[Run]]) -> None:
    """The median of each figure over the seeds, and the worst."""
    rows = []
    for name, some in runs.items():
        hits = [run.engines.hit for run in some]
        shares = [run.engines.hit / run.ceiling for run in some]
        loads = [run.engines.imbalance for run in some]
        halves, tails = ([1e3 * run.percentile(part) for run in some] for part in (0.5, 0.95))
        cells = [
            f"{statistics.median(hits):.4f} ({min(hits):.4f})",
            f"{statistics.median(shares):.2%} ({min(shares):.2%})",
            f"{statistics.median(loads):.3f} ({max(loads):.3f})",
            *(f"{statistics.median(each):.0f}ms ({max(each):.0f})" for each in (halves, tails)),
        ]
        rows.append([name, *cells])
    print(f"\n{cache}, medians of {len(next(iter(runs.values())))} (worst)")
    print(table(("subject", "hit", "of ceiling", "load", "p50", "p95"), rows))


def _arguments() -> argparse.Namespace:
    return parse(
        __doc__,
        install=(False, "the peers, into .venv-peers"),
        two_gateways=(False, "one gateway against two"),
        only=([], "names of subjects; default: all"),
        cache=(["roomy", "tight"], None, list(ROOM)),
        seeds=[1, 2, 3],
        workload=("tenants", None, SHAPES),
        tenants=Workload().tenants,
        in_flight=Workload().in_flight,
        max_tokens=Workload().max_tokens,
    )


if __name__ == "__main__":
    sys.exit(main())
