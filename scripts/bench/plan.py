"""Is what the planner says what an engine does, and how long does the plan of a month take?

`--backend` sends made-up conversations through a gateway to an engine, in real time, with TTLs cut
short so that leases end. The planner then simulates the turns of the ledger on an engine of the
same size. What both say is compared: hit rate and promise kept within 3 points, the first token's
p95 within 25 %. `--turns` plans a sample month.

    python -m scripts.bench.plan --backend synthetic
    python -m scripts.bench.plan --backend synthetic --blocks 1400
    python -m scripts.bench.plan --backend native
    python -m scripts.bench.plan --turns 60000
"""

import asyncio
import random
import resource
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.backends.synthetic import STEP_TOKENS
from engine.protocol import Description
from gateway.admin.plan import TrafficGathering
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.observed import observed
from gateway.ledger.reads.ranges import Range
from gateway.planner.plan import plan
from gateway.planner.points import Bench, asked_fleet, timing_of
from gateway.planner.requests import BLOCK_TOKENS, exact_unit_for
from gateway.planner.run import Outcome, Run
from gateway.planner.sizes import GIB, sizes_of
from gateway.planning.asked import PlanRequest
from gateway.planning.traffic import Job
from gateway.prices.files import load_prices
from scripts.bench.load import MESSAGES
from scripts.bench.report import percentile
from scripts.docs.dashboard_stack import seed
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, Stack, running_stack

_ALL_MS = 253_402_300_799_000
_POINTS, _SHARE = 0.03, 0.25
TTL_SCALE = 0.05
_SETTLED_SECONDS = 3.0
_ENDS = ("expired", "sacrificed", "yielded", "dropped", "damaged")


@dataclass(frozen=True, slots=True)
class Size:
    """One engine and its traffic; lengths are in characters, times in seconds.

    A step of the engine computes `step_tokens` of prompts at most.
    """

    num_blocks: int
    step_tokens: int
    settings: dict[str, str]
    system: int
    question: int
    talks: int
    turns: int
    gap: float
    answer: int
    model: str = ""


SIZES = {
    "synthetic": Size(
        4000,
        STEP_TOKENS,
        {"ENGINE_SYNTHETIC_PREFILL_US": "50", "ENGINE_SYNTHETIC_DECODE_MS": "5"},
        *(12_000, 2000, 16, 6, 4.0, 24),
    ),
    "native": Size(400, 256, {"ENGINE_MAX_STEP_TOKENS": "256"}, *(2500, 400, 12, 5, 3.0, 8)),
}


@dataclass(frozen=True, slots=True)
class Figures:
    hit_rate: float
    promise_kept: float | None
    leases: int
    p95: float


def main() -> int:
    options = parse(
        __doc__,
        backend="",
        turns=0,
        seed=1,
        blocks=(0, "of the engine's pool; 0: those of the bounds"),
    )
    if options.turns:
        return month(options.turns)
    size = SIZES[options.backend or "synthetic"]
    size = replace(size, num_blocks=options.blocks or size.num_blocks)
    settings = {
        "ENGINE_NUM_BLOCKS": str(size.num_blocks),
        "ENGINE_TTL_SCALE": str(TTL_SCALE),
        **size.settings,
    }
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        with running_stack(data, options.backend or "synthetic", settings) as stack:
            described = description_of(stack)
            size = replace(size, model=described.model)
            asyncio.run(send(stack, size, options.seed))
            time.sleep(300 * TTL_SCALE + _SETTLED_SECONDS)
            counters, least = counters_of(stack), described.min_cache_tokens
        job = asyncio.run(with_ledger(f"sqlite+aiosqlite:///{data}/ledger.db", gathered))
        measured = figures_of(data / "ledger.db", counters)
        outcome = simulated(replace_least(job, least), size)
    said = Figures(
        outcome.read / max(outcome.prompt, 1),
        outcome.promise_kept,
        sum(outcome.leases.values()),
        percentile(outcome.waits, 0.95),
    )
    return compared(measured, said, len(outcome.waits), job.prefill_us or 0.0)


def compared(measured: Figures, said: Figures, num_turns: int, prefill_us: float) -> int:
    print(f"{num_turns} turns; a computed token takes {prefill_us:.0f} us")
    print("                measured on the engine, simulated by the planner")
    print(f"  hit rate      {measured.hit_rate:.3f}  {said.hit_rate:.3f}")
    kept = [
        "-" if each.promise_kept is None else f"{each.promise_kept:.3f} of {each.leases}"
        for each in (measured, said)
    ]
    print(f"  promise kept  {kept[0]}  {kept[1]}")
    print(f"  first p95     {measured.p95:.3f} s  {said.p95:.3f} s")
    wrong = abs(measured.hit_rate - said.hit_rate) > _POINTS
    wrong |= abs((measured.promise_kept or 0) - (said.promise_kept or 0)) > _POINTS
    wrong |= abs(said.p95 / measured.p95 - 1) > _SHARE
    print("not within the bounds" if wrong else "within the bounds")
    return int(wrong)


async def send(stack: Stack, size: Size, seed: int) -> None:
    """Conversations of two system prompts that begin one after the other."""
    chance = random.Random(seed)
    async with httpx.AsyncClient(base_url=stack.gateway, headers=API_HEADERS, timeout=300) as http:
        spread = size.gap * size.turns
        await asyncio.gather(
            *(
                talk(http, size, random.Random(f"{seed} {number}"), chance.uniform(0, spread))
                for number in range(size.talks)
            )
        )


async def talk(http: httpx.AsyncClient, size: Size, chance: random.Random, start: float) -> None:
    await asyncio.sleep(start)
    mark = {"type": "ephemeral"}
    which = chance.randrange(2)
    rules = (f"rule {which} of the house. " * size.system)[: size.system]
    messages: list[dict[str, Any]] = []
    for _ in range(size.turns):
        text = "".join(f"{chance.randrange(10**6)} " for _ in range(size.question))
        block = {"type": "text", "text": text[: size.question], "cache_control": mark}
        body = {
            "model": size.model,
            "max_tokens": size.answer,
            "system": [{"type": "text", "text": rules, "cache_control": mark}],
            "messages": [*messages, {"role": "user", "content": [block]}],
        }
        reply = await http.post(MESSAGES, json=body)
        reply.raise_for_status()
        said = "".join(part.get("text", "") for part in reply.json()["content"])
        plain = {"type": "text", "text": block["text"]}
        messages.append({"role": "user", "content": [plain]})
        messages.append({"role": "assistant", "content": said or "-"})
        await asyncio.sleep(chance.expovariate(1 / size.gap))


def counters_of(stack: Stack) -> dict[str, int]:
    with stack.engine_client() as http:
        found: dict[str, int] = http.get("/v1/stats").raise_for_status().json()["counters"]
    return found


def description_of(stack: Stack) -> Description:
    with stack.engine_client() as http:
        found = http.get("/v1/describe").raise_for_status().content
    return msgspec.json.decode(found, type=Description)


async def gathered(ledger: Ledger) -> Job:
    gathering = TrafficGathering(load_prices())
    async for rows in observed(ledger, Range(since_ms=0, until_ms=_ALL_MS), None, 100_000):
        gathering.take(rows)
    return gathering.job(PlanRequest())


def figures_of(ledger: Path, counters: dict[str, int]) -> Figures:
    with sqlite3.connect(ledger) as database:
        rows = database.execute(
            "select cache_read_tokens, input_tokens + cache_read_tokens + cache_write_5m_tokens"
            " + cache_write_1h_tokens, first_token_seconds from turns"
        ).fetchall()
    ends = {name: counters.get(f"leases_{name}", 0) for name in _ENDS}
    num_leases = sum(ends.values())
    return Figures(
        sum(row[0] for row in rows) / sum(row[1] for row in rows),
        ends["expired"] / num_leases if num_leases else None,
        num_leases,
        percentile([row[2] for row in rows], 0.95),
    )


def simulated(job: Job, size: Size) -> Outcome:
    """An engine of the same blocks. Its times are the ledger's."""
    asked = PlanRequest(weights_gib=0.0, device_gib=1.0)
    per_token = sizes_of(asked).bytes_per_token
    asked = replace_gib(asked, size.num_blocks * BLOCK_TOKENS * per_token / GIB + 1e-6)
    timing = replace(timing_of(job), step_tokens=size.step_tokens)
    unit = exact_unit_for(job.turns)
    bench = Bench(asked, sizes_of(asked), unit, timing, 10**9)
    fleet = asked_fleet(asked)
    capacities = replace(bench.capacities(fleet), ttl_scale=TTL_SCALE)
    run = Run(1, capacities, bench.costs(fleet), unit, lambda count: None)
    return run.run(bench.requests(job.turns, is_warmed=False))


def replace_least(job: Job, min_cache_tokens: int) -> Job:
    return msgspec.structs.replace(job, min_cache_tokens=min_cache_tokens)


def replace_gib(asked: PlanRequest, gib: float) -> PlanRequest:
    return msgspec.structs.replace(asked, device_gib=gib)


def month(num_turns: int) -> int:
    """The CPU seconds of reading a month, and of its plan."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        seed(data, num_turns)
        before = time.process_time()
        job = asyncio.run(with_ledger(f"sqlite+aiosqlite:///{data}/ledger.db", gathered))
        read = time.process_time() - before
        began = time.perf_counter()
        found = plan(job, lambda share: None)
    took = time.perf_counter() - began
    own = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    forks = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    print(found.text)
    print(
        f"{found.turns:,} turns: {took:.1f} s, of CPU {own:.1f} s ({read:.1f} reading the ledger)"
        f" and {forks:.1f} s in two processes"
    )
    return 0 if took + read <= 30 else 1


if __name__ == "__main__":
    sys.exit(main())
