"""Load on gateways: many streams at once, or a mixture for a long time; does anything grow?

Of gateways and engines only URLs are asked, so that it does not matter where they run.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from scripts.bench.load import MESSAGES, Answer, ask, body_of, headers_of

ENGINE = {
    # So few that they are full well before the second half, of which growth is measured.
    "ENGINE_NUM_BLOCKS": "8192",
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_MAX_RUNNING": "1024",
    "ENGINE_MAX_WAITING": "4096",
    "ENGINE_SYNTHETIC_DECODE_MS": "50",
    "ENGINE_LOG_LEVEL": "error",
}
GATEWAY = {"HOLDFAST_LOG_LEVEL": "error", "HOLDFAST_QUEUE_SECONDS": "120"}
IDLE_SECONDS = 120.0
# Connections that are kept, and files that happen to be open.
SPARE_FDS = 8
MIB = 1 << 20
# Odd, so that each goes through both of two gateways.
_HANDBOOKS = 31


@dataclass(frozen=True)
class Target:
    """`urls` are gateways, `engines` what stands behind them; both have `/metrics`."""

    urls: Sequence[str]
    engines: Sequence[str]
    key: str
    model: str


@dataclass
class Streams:
    """`wrong` says what was not as it should be, stream by stream; times are in seconds."""

    count: int
    first: list[float] = field(default_factory=list)
    seconds: float = 0.0
    num_open_at_once: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Reading:
    """One look at one process: its resident bytes and its open descriptors.

    `active` counts an engine's blocks that sequences hold, `waiting` turns that are in a journal or
    that an engine has not been told to forget.
    """

    at: float
    rss: float
    fds: float
    active: float
    waiting: float


def values(text: str) -> dict[str, float]:
    """Every value of a page of Prometheus metrics, by its name with its labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def total(found: Mapping[str, float], name: str, label: str = "") -> float:
    """The sum over the series of a metric, those with this label."""
    return sum(
        value
        for series, value in found.items()
        if series.partition("{")[0] == name and label in series
    )


async def reading(http: httpx.AsyncClient, url: str) -> Reading:
    found = values((await http.get(f"{url}/metrics")).text)
    return Reading(
        at=time.monotonic(),
        rss=found["process_resident_memory_bytes"],
        fds=found["process_open_fds"],
        active=total(found, "holdfast_engine_kv_blocks", 'state="active"'),
        waiting=found.get("holdfast_gateway_journal_backlog", 0.0)
        + total(found, "holdfast_engine_unacknowledged"),
    )


async def readings(target: Target) -> dict[str, Reading]:
    async with client() as http:
        return {url: await reading(http, url) for url in (*target.urls, *target.engines)}


async def idle_readings(
    target: Target, before: Mapping[str, Reading] | None = None
) -> dict[str, Reading]:
    """Read every process once nothing runs and nothing waits.

    With `before`, idle connections get time to end as well. Raises TimeoutError where something
    still runs after IDLE_SECONDS.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while True:
        found = await readings(target)
        is_idle = not any(one.active or one.waiting for one in found.values())
        extra = max(one.fds - before[url].fds for url, one in found.items()) if before else 0
        is_late = time.monotonic() > deadline
        if is_idle and (extra <= SPARE_FDS or is_late):
            return found
        if is_late:
            raise TimeoutError(f"not idle after {IDLE_SECONDS} s: {found}")
        await asyncio.sleep(0.5)


def client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=300, limits=limits, trust_env=False)


def body(target: Target, system: str, question: str, **changes: Any) -> dict[str, Any]:
    return body_of(target.model, system, question, **{"max_tokens": 32, **changes})


async def run_streams(target: Target, count: int, max_tokens: int) -> Streams:
    """So many streams at once, spread over the gateways; each must be whole and in order.

    They share some handbooks: of a single one all streams would go to the one engine that has it.
    """
    found = Streams(count)
    rules = "A rule that many share. " * 120

    async def one(http: httpx.AsyncClient, number: int) -> Answer:
        url = target.urls[number % len(target.urls)] + MESSAGES
        handbook = f"Handbook {number % _HANDBOOKS}. {rules}"
        asked = body(target, handbook, f"stream {number}", stream=True, max_tokens=max_tokens)
        return await ask(http, asked, url, headers_of(target.key))

    begun = time.monotonic()
    async with client() as http:
        answers = await asyncio.gather(*(one(http, number) for number in range(count)))
    found.seconds = time.monotonic() - begun
    found.first = [one.first_seconds for one in answers if one.first_seconds is not None]
    found.num_open_at_once = most_at_once(answers)
    for number, answer in enumerate(answers):
        if fault := answer.error or disorder(answer.events, answer.text, max_tokens):
            found.wrong.append(f"{number}: {answer.status} {fault}")
    return found


def most_at_once(answers: Sequence[Answer]) -> int:
    """How many had begun to answer, and not ended, at the same time."""
    begun = [(one.begun + one.first_seconds, 1) for one in answers if one.first_seconds is not None]
    ended = [(one.begun + one.seconds, -1) for one in answers if one.first_seconds is not None]
    return max(accumulate(change for _, change in sorted(begun + ended)), default=0)


def disorder(names: list[str], text: str, max_tokens: int) -> str:
    """What is wrong with a stream of the synthetic engine, whose words count up."""
    ends = [name for name in names if name not in ("ping", "content_block_delta")]
    order = ["message_start", "content_block_start", "content_block_stop"]
    if ends != [*order, "message_delta", "message_stop"]:
        return f"events {ends}"
    wanted = " ".join(["synthetic", *(str(number) for number in range(max_tokens - 1))])
    return "" if text == wanted else f"text {text[:80]!r}… of {len(text)} characters"


@dataclass
class Soak:
    """What came of a long mixture: answers by kind and status, and readings over time."""

    asked: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    history: dict[str, list[Reading]] = field(default_factory=dict)


async def run_soak(
    target: Target, seconds: float, clients: int, pause: float, seed: int = 1
) -> Soak:
    """Hits, misses, aborts and errors, by so many clients at once."""
    soak, until = Soak(), time.monotonic() + seconds

    async def watch() -> None:
        while time.monotonic() < until:
            for url, found in (await readings(target)).items():
                soak.history.setdefault(url, []).append(found)
            await asyncio.sleep(pause)

    async with client() as http:
        await asyncio.gather(
            watch(), *(_mix(http, target, soak, until, f"{seed}-{n}") for n in range(clients))
        )
    return soak


async def _mix(
    http: httpx.AsyncClient, target: Target, soak: Soak, until: float, seed: str
) -> None:
    rng, headers = random.Random(seed), headers_of(target.key)
    number = 0
    while time.monotonic() < until:
        number += 1
        url = rng.choice(list(target.urls)) + MESSAGES
        kind = rng.choices(("hit", "miss", "abort", "error"), (50, 25, 15, 10))[0]
        shared = f"Handbook {rng.randrange(20)}. " if kind != "miss" else f"New {seed} {number}. "
        asked = body(target, shared + "Another rule. " * 150, f"question {seed} {number}")
        try:
            if kind == "abort":
                asked |= {"stream": True, "max_tokens": 200}
                async with http.stream("POST", url, json=asked, headers=headers) as reply:
                    async for _ in reply.aiter_bytes():
                        if rng.random() < 0.2:
                            break
                status = reply.status_code
            else:
                asked |= {"temperature": 7} if kind == "error" else {}
                reply = await http.post(url, json=asked, headers=headers)
                status = reply.status_code
        except httpx.TransportError as error:
            soak.unexpected.append(f"{kind}: {error!r}")
            continue
        soak.asked[f"{kind} {status}"] += 1
        if status not in ({400} if kind == "error" else {200, 529}):
            soak.unexpected.append(f"{kind}: {status} {reply.text[:200]}")


def slope_an_hour(history: Sequence[Reading], name: str) -> float:
    """By least squares, of the second half: in the first, caches and pools fill."""
    half = list(history)[len(history) // 2 :]
    times = [one.at for one in half]
    found = [float(getattr(one, name)) for one in half]
    middle, mean = sum(times) / len(times), sum(found) / len(found)
    spread = sum((at - middle) ** 2 for at in times)
    if not spread:
        return 0.0
    both = zip(times, found, strict=True)
    return sum((at - middle) * (value - mean) for at, value in both) / spread * 3600
