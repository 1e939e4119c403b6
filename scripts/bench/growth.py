"""How a gateway bears 200 engines, a million prefixes and a ledger of many turns.

    python -m scripts.bench.growth [--engines N] [--prefixes N] [--turns N] [--only choice index …]

- *choice*: the CPU time of one choice of an engine.
- *index*: a gateway takes in engines' snapshots as after a restart, from their JSON, without HTTP.
  Then turns are placed that continue prefixes of which engines hold the beginnings, with the whole
  index and with a tenth of its names. The engines are stand-ins: they hold what the product placed
  on them. Names of prefixes that are not asked for are random.
- *ledger*: every call of the dashboard's pages, by a real gateway over a ledger of made-up turns of
  the last hours, 200 a second or what `--rate` says, on SQLite or `--database-url`.
- *engines*: a gateway in front of real synthetic engines under load. One comes, and one is stopped
  (SIGSTOP). At the end the client's count and the ledger's are compared.
"""

import asyncio
import gc
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import httpx
import msgspec
import psutil  # type: ignore[import-untyped]

from engine.protocol import ChainHeld, Document, HeldName, Name, Snapshot
from engine.protocol.reports import Description, Technique
from gateway.base.catalogue import CatalogueModel
from gateway.base.record import TurnRecord
from gateway.base.settings import DatabaseSettings
from gateway.cli.migrate import migrate
from gateway.dialects.lowering import RequestContext
from gateway.dialects.openai.lower import chat_ask_of
from gateway.dialects.openai.request import decode_chat
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.upkeep import claim, fill
from gateway.prompt.approximate import Approximate, Demand
from gateway.prompt.ask import Ask, Principal
from gateway.routing.breaker import Breaker
from gateway.routing.held import (
    BYTES_PER_NAME,
    INDEX_BYTES,
    Holdings,
    PrefixIndex,
    SnapshotPart,
    frames_of,
)
from gateway.routing.router import Load, Route, Router, kind_of, likely_holders
from scripts.bench.load import body_of, headers_of
from scripts.bench.report import machine_line, table
from scripts.setup.options import parse
from scripts.stack import (
    ADMIN_KEY,
    API_KEY,
    cpu_seconds,
    engine_environment,
    free_port,
    python,
    serving,
    serving_engine,
    serving_gateway,
)

PARTS = ("choice", "index", "ledger", "engines")
NAME_TOKENS = 512
SYSTEM_NAMES = 8
OWN_NAMES = 4
NUM_SYSTEMS = 1000
DESCRIPTION = Description(
    backend="synthetic",
    model="m",
    epoch="e",
    max_context_tokens=1_000_000,
    block_size=16,
    num_blocks=1 << 20,
    granularity=1,
    min_cache_tokens=16,
    capabilities=["tools"],
    techniques=[
        Technique(method="blocks", parameter=0, kl=0.0, agreement=1.0, tokens=1, is_allowed=True)
    ],
)


@dataclass
class StandIn:
    """What routing knows of an engine, and what it holds."""

    number: int
    holdings: Holdings
    url: str = ""
    kind: str = kind_of(DESCRIPTION)
    description: Description | None = DESCRIPTION
    is_draining: bool = False
    load: Load = field(default_factory=lambda: Load(600.0))
    breaker: Breaker = field(default_factory=Breaker)
    # The tokens up to each name that it holds.
    truth: dict[str, int] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        self.seed = self.number * 0x9E3779B97F4A7C15 & (1 << 64) - 1

    def held(self, digests: Sequence[str]) -> ChainHeld:
        names = [HeldName(name, self.truth[name]) for name in digests if name in self.truth]
        return ChainHeld(seq=0, names=names, num_leased=len(names))


def fleet(num: int, index: PrefixIndex, truth: Sequence[dict[str, int]] = ()) -> list[StandIn]:
    engines = [StandIn(n, Holdings(index), url=f"http://e{n}") for n in range(num)]
    for engine, names in zip(engines, truth, strict=False):
        engine.truth = names
    return engines


def ask_of(digests: Sequence[str], template: list[Ask], num_documents: int = 0) -> Ask:
    """A turn whose prompt has these names, NAME_TOKENS apart. The last names are documents'."""
    if not template:
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        request = RequestContext(
            Principal("w", "k", "scope"), CatalogueModel(id="m", display_name="m"), 0.0
        )
        template.append(chat_ask_of(decode_chat(msgspec.json.encode(body)), request))
    names = [Name(digest, 0, number) for number, digest in enumerate(digests)]
    lengths = [4 * NAME_TOKENS * (number + 1) for number in range(len(digests))]
    num_prefixes = len(names) - num_documents
    approximate = None
    if num_documents:
        documents = [Document(0, name=name.digest) for name in names[num_prefixes:]]
        begins = [0, *lengths][num_prefixes:-1]
        approximate = Approximate(
            documents=documents,
            document_bytes=[(begin, begin + 4 * NAME_TOKENS) for begin in begins],
            demands=[Demand(path="", method="blocks", parameter=0) for _ in documents],
        )
    plan = msgspec.structs.replace(
        template[0].plan,
        names=names[:num_prefixes],
        name_bytes=lengths[:num_prefixes],
        approximate=approximate,
    )
    return msgspec.structs.replace(template[0], plan=plan)


def fleet_holding(num_engines: int, num_holders: int, names: Sequence[str]) -> list[StandIn]:
    """Engines with a turn each, of which the first `num_holders` hold these names."""
    engines = fleet(num_engines, PrefixIndex())
    for engine in engines:
        held_names = [HeldName(name, 16) for name in names] if engine.number < num_holders else []
        chain = ChainHeld(seq=1, names=held_names, num_leased=len(held_names))
        engine.holdings.apply(Snapshot(seq=1, epoch="e", chains=[chain]), 0.0)
        engine.load.assign("t", 1000 + engine.number, 0.0)
    return engines


def bench_choice(num_engines: int) -> None:
    rows = []
    template = list[Ask]()
    for num_names, num_documents in ((10, 0), (64, 0), (512, 0), (128, 64)):
        names = [f"{n:016x}" for n in range(num_names)]
        cells = []
        num_prefixes = num_names - num_documents
        for num_holders, share in ((0, 0.0), (1, 1.0), (num_engines, 0.5)):
            prefixes = names[: int(share * num_prefixes)]
            documents = names[num_prefixes:][: int(share * num_documents)]
            engines = fleet_holding(num_engines, num_holders, [*prefixes, *documents])
            ask = ask_of(names, template, num_documents)
            seconds = []
            for _ in range(400):
                begun = time.thread_time()
                Router().choose(ask, engines, 1.0)
                seconds.append(time.thread_time() - begun)
            cells.append(f"{1e3 * statistics.median(seconds):.3f}")
        documents_note = f", {num_documents} of documents" if num_documents else ""
        rows.append([f"{num_names}{documents_note}", *cells])
    print(f"\nchoice among {num_engines} engines, ms of CPU, median (0.2 wanted)")
    print(table(("names", "nobody holds", "one holds all", "all hold half"), rows), flush=True)


def prompt_of(number: int, turn: int) -> list[str]:
    """Names of a conversation behind one of the system prompts."""
    own_names = OWN_NAMES + turn
    system = [f"{number % NUM_SYSTEMS:08x}{n:08x}" for n in range(SYSTEM_NAMES)]
    return [*system, *(f"{number + (1 << 30):08x}{n:08x}" for n in range(own_names))]


def serve(engines: list[StandIn], number: int, turn: int, template: list[Ask]) -> tuple[int, int]:
    """Place one turn as the dispatcher does. Return how many of its names its engine held, and how
    many it has."""
    names = prompt_of(number, turn)
    now = float(number % 1_000_000) / 200
    router = Router()
    for engine in engines:
        engine.holdings.heard_at = now
    ask = ask_of(names, template)
    route: Route[StandIn] = router.choose(ask, engines, now)
    likely = likely_holders(route, engines)
    for engine in likely:
        engine.holdings.hold([engine.held(route.expected)])
    if likely:
        route = router.choose(ask, engines, now)
    chosen = route.engine
    num_read = next((n for n, name in enumerate(names) if name not in chosen.truth), len(names))
    computed = (len(names) - num_read) * NAME_TOKENS
    turn_id = f"{number} {turn}"
    chosen.load.assign(turn_id, route.to_prefill, now)
    chosen.load.started(turn_id, computed, now)
    chosen.load.ended(turn_id)
    chosen.truth.update({name: NAME_TOKENS * (n + 1) for n, name in enumerate(names)})
    chosen.holdings.index.hold(chosen.holdings.slot, chosen.held(names))
    return num_read, len(names)


def snapshot_line(engine: StandIn, num_prefixes: int) -> bytes:
    """A snapshot of what the engine holds, filled up to `num_prefixes` with prefixes that no turn
    asks for."""
    draw = random.Random(engine.number)
    chains = [engine.held([name]) for name in engine.truth]
    for _ in range(max(num_prefixes - len(engine.truth) // OWN_NAMES, 0)):
        names = [
            HeldName(f"{draw.getrandbits(64):016x}", NAME_TOKENS * (SYSTEM_NAMES + n + 1))
            for n in range(OWN_NAMES)
        ]
        chains.append(ChainHeld(seq=0, names=names, num_leased=OWN_NAMES))
    draw.shuffle(chains)
    return msgspec.json.encode(Snapshot(seq=1, epoch="e", chains=chains))


async def take_in(engines: list[StandIn], num_prefixes: int) -> tuple[float, float]:
    """Seconds until all snapshots were taken in, and the longest pause of the loop meanwhile."""
    pauses = [0.0]
    busy = 0.0

    async def tick() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - begun - 0.001)

    async def follow(engine: StandIn, line: bytes) -> None:
        await engine.holdings.index.wait_turn()
        for frame in frames_of(line):
            engine.holdings.apply(frame, 0.0)
            if isinstance(frame, SnapshotPart):
                await engine.holdings.index.wait_turn()

    for start in range(0, len(engines), 20):  # the lines of all would take more than the names
        part = engines[start : start + 20]
        lines = [snapshot_line(engine, num_prefixes) for engine in part]
        ticking = asyncio.create_task(tick())
        begun = time.perf_counter()
        await asyncio.gather(*(follow(*pair) for pair in zip(part, lines, strict=True)))
        busy += time.perf_counter() - begun
        ticking.cancel()
        del lines
    return busy, max(pauses)


def bench_index(num_engines: int, num_prefixes: int, num_asked: int) -> None:
    template = list[Ask]()
    engines = fleet(num_engines, PrefixIndex(1 << 40))
    for number in range(num_asked):
        serve(engines, number, 0, template)
    truth = [engine.truth for engine in engines]
    del engines
    rows = list[list[str]]()
    whole = 0
    for label in ("forgets nothing", "default bound", "a tenth of the names"):
        bound = (1 << 40, INDEX_BYTES, whole // 10 * BYTES_PER_NAME)[len(rows)]
        # It runs in its own process, so that no other memory counts.
        with get_context("fork").Pool(1) as child:
            row, num_names = child.apply(one_index, (label, bound, truth, num_prefixes, num_asked))
        rows.append(row)
        whole = whole or num_names
    heads = ("index", "names", "forgotten", "memory", "bytes a name", "read share", "all known")
    print(f"\n{num_prefixes:,} prefixes on {num_engines} engines, {num_asked:,} of them asked for")
    print("(a gateway takes 130 to 160 MB besides; 1 GB, 15 s and 50 ms wanted)")
    print(table((*heads, "longest pause"), rows), flush=True)


def one_index(
    label: str, bound: int, truth: list[dict[str, int]], num_prefixes: int, num_asked: int
) -> tuple[list[str], int]:
    gc.collect()
    gc.freeze()  # as a gateway does
    before = psutil.Process().memory_info().rss
    index = PrefixIndex(bound)
    engines = fleet(len(truth), index, truth)
    template = list[Ask]()
    seconds, pause = asyncio.run(take_in(engines, num_prefixes // len(engines)))
    gc.collect()
    num_bytes = psutil.Process().memory_info().rss - before
    num_names = len(index)
    forgotten = index.num_forgotten
    order = list(range(num_asked))
    random.Random(1).shuffle(order)
    reads = [serve(engines, number, 1, template) for number in order]
    share = sum(num_read for num_read, _ in reads) / sum(num for _, num in reads)
    cells = [label, f"{num_names:,}", f"{forgotten:,}", f"{num_bytes / 1e6:,.0f} MB"]
    cells += [f"{num_bytes / max(num_names, 1):.0f}", f"{share:.4f}", f"{seconds:.1f} s"]
    return [*cells, f"{1e3 * pause:.0f} ms"], num_names


def made_turns(number: int, rate: float, num_engines: int) -> Iterator[TurnRecord]:
    """The newest turns of the last hours: 20 workspaces with 5 keys each."""
    draw = random.Random(7)
    now = datetime.now(UTC)
    for turn in range(number):
        workspace = min(int(draw.expovariate(0.3)), 19)
        prefix = draw.randrange(max(number // 20, 1))
        read_tokens = draw.choice((0, 4000, 8000))
        yield TurnRecord(
            id=f"msg_{turn:028x}",
            instance="bench",
            workspace="default" if not workspace else f"team-{workspace}",
            key_id=f"key_{workspace}_{draw.randrange(5)}",
            model="synthetic",
            engine=f"engine-{draw.randrange(num_engines)}",
            engine_model="synthetic",
            epoch=f"{turn * 3 // number:032x}",
            stream=True,
            opened_at=now - timedelta(seconds=(number - turn) / rate),
            outcome="api_error" if draw.random() < 1e-4 else "stop",
            miss_reason=None if read_tokens else "cold",
            input_tokens=draw.randrange(10, 4000),
            cache_read_tokens=read_tokens,
            cache_write_5m_tokens=0 if read_tokens else 4000,
            computed_tokens=100,
            output_tokens=draw.randrange(1, 500),
            first_token_seconds=draw.expovariate(2.0),
            duration_seconds=1.0,
            prefill_seconds=0.05,
            prefix=f"{prefix:016x}",
            prefix_ttl="5m",
            status=200,
        )


async def fill_ledger(ledger: Ledger, number: int, rate: float, num_engines: int) -> None:
    """Fill the ledger as sample data is filled in: the turns, then their sums."""
    now = datetime.now(UTC)
    workspaces = [{"id": f"team-{n}", "created_at": now, "keep_days": None} for n in range(1, 20)]
    key = {"id": "key_1_0", "workspace_id": "team-1", "name": "one", "digest": "0" * 64}
    await claim(ledger, now, workspaces, [{**key, "created_at": now}])
    await fill(ledger, made_turns(number, rate, num_engines))


def bench_ledger(number: int, rate: float, num_engines: int, url: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        settings = DatabaseSettings(data=Path(name), database_url=url)
        migrate(settings)
        begun = time.perf_counter()
        newest = int(time.time())
        work = partial(fill_ledger, number=number, rate=rate, num_engines=num_engines)
        asyncio.run(with_ledger(settings.ledger_url, work, 3600.0))
        size = (settings.sqlite_path.stat().st_size / number) if settings.sqlite_path else 0.0
        settings_of_url = {"HOLDFAST_DATABASE_URL": url} if url else {}
        print(f"\n{number:,} turns at {rate:.0f} a second of {num_engines} engines on", end=" ")
        print(
            f"{settings.ledger_url.partition(':')[0]}, made in {time.perf_counter() - begun:.0f} s"
        )
        if settings.sqlite_path is not None:
            print(f"{size:,.0f} bytes a turn; rows of sums:", end="")
            with closing(sqlite3.connect(settings.sqlite_path)) as db:
                for name_of in ("turn_rollups", "reason_rollups", "latency_rollups", "prefixes"):
                    ((rows,),) = db.execute(f"SELECT count(*) FROM {name_of}")
                    print(f" {name_of} {rows:,}", end="", flush=True)
        engine = [f"http://127.0.0.1:{free_port()}"]
        with serving_gateway(Path(name), engine, settings_of_url, ready="/healthz") as server:
            gateway = server.wait().url
            with httpx.Client(base_url=gateway, headers={"x-api-key": ADMIN_KEY}) as http:
                time_calls(http, newest // 5 * 5 + 5)


PAGE_CALLS = (
    "about",
    "usage",
    "savings",
    "latency",
    "latency/samples",
    "engines/history",
    "usage/groups?group_by=workspace",
    "usage/groups?group_by=key",
    "engines",
    "leases",
    "usage/groups?group_by=model",
    "prefixes",
    "turns/search",
    "turns/search?outcome=error",
    "turns/search?miss_reason=any",
    "engines/memory",
    "engines/load",
    "refusals",
    "usage/groups?group_by=engine",
    "usage?engine=engine-0",
    "usage?workspace=default",
    "savings?workspace=default",
    "latency?engine=engine-0",
    "export.csv?rows=hours",
)
"""What the dashboard's pages ask for."""


def time_calls(http: httpx.Client, now: int) -> None:
    """Every call of a page, over an hour and a day as the dashboard asks."""
    rows = []
    for path in PAGE_CALLS:
        cells = []
        for hours in (1, 24):
            since = 1000 * (now - 3600 * hours)
            until = 1000 * now
            is_ranged = path.split("?")[0] not in ("about", "engines", "leases", "engines/memory")
            is_ranged &= path != "refusals"
            spans = f"{'&' if '?' in path else '?'}since_ms={since}&until_ms={until}"
            seconds = []
            status = 0
            for _ in range(3):
                begun = time.perf_counter()
                reply = http.get(f"/admin/v1/{path}{spans if is_ranged else ''}", timeout=120)
                seconds.append(time.perf_counter() - begun)
                status = reply.status_code
            status_note = "" if status == 200 else f" ({status})"
            cells.append(f"{seconds[0]:.2f} {statistics.median(seconds):.2f}{status_note}")
        rows.append([path, *cells])
    print(table(("call: first, median of three, s", "1 hour", "24 hours"), rows), flush=True)


def wait(turns: Sequence[Future[None]]) -> None:
    """Wait for all of them. Raise the error of the first that failed."""
    for turn in turns:
        turn.result()


def bench_engines(num_engines: int, minutes: float) -> None:
    """Real engines: one comes late, one is stopped, and then some minutes of turns."""
    began_ms = int(time.time() * 1000)
    quiet = {"ENGINE_LOG_LEVEL": "error", "ENGINE_SYNTHETIC_PREFILL_US": "5"}
    late = free_port()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = [
            stack.enter_context(serving_engine("synthetic", quiet, folder / f"{n}.log"))
            for n in range(num_engines)
        ]
        urls = [engine.wait().url for engine in engines]
        urls.append(f"http://127.0.0.1:{late}")
        server = stack.enter_context(serving_gateway(folder, urls, {"HOLDFAST_LOG_LEVEL": "error"}))
        gateway = server.wait().url
        busy = cpu_seconds(server.process.pid)
        time.sleep(10)
        idle = (cpu_seconds(server.process.pid) - busy) / 10
        print(f"\n{num_engines} engines; idle, a gateway takes {idle:.2%} of a core")
        http = stack.enter_context(httpx.Client(base_url=gateway, headers=headers_of(API_KEY)))
        # When each answer came, its engine and its status.
        answers = list[tuple[float, str, int]]()

        def send(number: int) -> None:
            body = body_of("synthetic", f"Prefix {number % 2000} " * 300, "q", max_tokens=2)
            reply = http.post("/v1/messages", json=body, timeout=120)
            name = reply.json()["holdfast"]["engine"] if reply.status_code == 200 else ""
            answers.append((time.monotonic(), name, reply.status_code))

        threads = stack.enter_context(ThreadPoolExecutor(8))
        turns = [threads.submit(send, number) for number in range(200)]
        command = [*python("engine"), "--backend", "synthetic"]
        environment = engine_environment(late, quiet)
        comes = stack.enter_context(serving(command, environment, late, log=folder / "late.log"))
        comes.wait()
        ready = time.monotonic()
        turns += [threads.submit(send, number) for number in range(200, 600)]
        wait(turns)
        new_name = f"engine-{num_engines}"
        first_at = next((at for at, name, _ in sorted(answers) if name == new_name), None)
        first_note = "none came" if first_at is None else f"{first_at - ready:.2f} s"
        print(f"a new engine's first turn, after it was ready: {first_note} (1 wanted)", flush=True)
        num_before = len(answers)
        os.kill(engines[0].process.pid, signal.SIGSTOP)
        try:
            wait([threads.submit(send, number) for number in range(600, 1100)])
        finally:
            os.kill(engines[0].process.pid, signal.SIGCONT)
        failed = sum(status != 200 for _, _, status in answers[num_before:])
        num_turns = len(answers) - num_before
        print(f"a hung engine among {num_engines + 1}: {failed} of {num_turns} turns failed")
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            numbers = range(len(answers), len(answers) + 400)
            wait([threads.submit(send, number) for number in numbers])
        print_ledger_count(http, began_ms, [status for _, _, status in answers])


def print_ledger_count(http: httpx.Client, since_ms: int, statuses: Sequence[int]) -> None:
    """Once the journal is empty, compare the answers that clients got with the ledger's turns."""
    while http.get("/readyz").json()["journal"]["backlog"]:
        time.sleep(0.1)
    period = {"since_ms": since_ms, "until_ms": int(time.time() * 1000) + 1}
    reply = http.get("/admin/v1/usage", params=period, headers={"x-api-key": ADMIN_KEY})
    totals = reply.json()["totals"]
    num_answered = statuses.count(200)
    print(
        f"{len(statuses):,} turns were sent, {num_answered:,} answered; in the ledger are", end=" "
    )
    print(f"{totals['requests']:,}, {totals['requests'] - totals['errors']:,} without an error")


def main() -> int:
    options = parse(
        __doc__,
        engines=200,
        prefixes=1_000_000,
        asked=(10_000, "prefixes that a turn continues"),
        turns=(500_000, "of the ledger"),
        rate=(200.0, "turns a second of the ledger"),
        database_url=("", "of an empty PostgreSQL database, instead of SQLite"),
        real=(4, "engines that really run"),
        minutes=(0.0, "of turns to them, at the end"),
        only=(list(PARTS), "parts", PARTS),
    )
    print(machine_line(), f"load {os.getloadavg()[0]:.1f}")
    if "choice" in options.only:
        bench_choice(options.engines)
    if "index" in options.only:
        bench_index(options.engines, options.prefixes, options.asked)
    if "ledger" in options.only:
        bench_ledger(options.turns, options.rate, options.engines, options.database_url)
    if "engines" in options.only:
        bench_engines(options.real, options.minutes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
